"""An agent that gets SIGKILL leaves nothing: no process, no etcd, no runtime directory; what was logged stays."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.wait import eventually

GONE_S = 10.0


@pytest.fixture
def home() -> Iterator[Path]:
    """A TMPDIR that is short enough for sockets: below a longer one, as pytest's may be, an agent goes to /tmp."""
    with tempfile.TemporaryDirectory(prefix="bagua-killed-", dir="/tmp") as made:
        yield Path(made)


@pytest.mark.parametrize("logged", [False, True])
def test_sigkill_leaves_nothing_behind(
    job: MakeJob, home: Path, monkeypatch: pytest.MonkeyPatch, logged: bool
) -> None:
    monkeypatch.setenv("TMPDIR", str(home))
    one = job(options=["--redirects", "3"] if logged else [])
    node: Node = one.start(slots=2)
    one.await_world(2)
    family = node.family
    assert len(family) >= 4, "workers, guardian and etcd"
    sockets = [path for path in home.rglob("session.sock")]
    assert len(sockets) == 1
    runtime = sockets[0].parent
    assert (runtime / "store" / "data").is_dir()
    logs = [path for path in home.glob("bagua-*") if path != runtime]
    assert len(logs) == 1
    node.kill_agent()
    eventually(lambda: not Job.alive(family), GONE_S, lambda: f"{Job.alive(family)} gone")
    assert not runtime.exists()
    assert logs[0].exists() == logged
    if logged:
        assert [path for path in logs[0].rglob("stdout.log")]
    assert not [path for path in home.iterdir() if path not in logs and path.name.startswith("bagua")], (
        os.listdir(home)
    )


def test_the_next_agent_removes_what_a_killed_host_left(
    job: MakeJob, make_lab: MakeLab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a host its guardians die too. Two jobs share the directory for temporary files, as containers of a machine
    do: the one that goes on keeps its own."""
    monkeypatch.setenv("TMPDIR", str(home))
    lab = make_lab(2)
    first, second = job(), job()
    first.start(lab.hosts[0])
    first.await_step(1)
    (left,) = [path.parent for path in home.rglob("session.sock")]
    lab.hosts[0].kill_all()
    assert left.exists(), "nothing of the host was left to remove it"
    second.start(lab.hosts[1])
    second.await_step(1)
    (kept,) = [path.parent for path in home.rglob("session.sock")]
    assert kept != left and not left.exists()
    second.finish()
