"""The newcomer's benchmark: its shells, and a trial with programs that are installed already, on a lab host."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from benchmarks.kept_plots import KINDS
from benchmarks.newcomer import Milestone, Terminal, is_in_time, told
from tests.docs.page_blocks import ROOT
from tests.lab import namespaces
from tests.lab.network import Lab
from tests.lab.wait import HANG_S

LIMIT_S = 30.0
MODULES = {"bagua-launch": "bagua_launch", "bagua-agent": "bagua_agent.service"}
REACHED = (
    Milestone("the first elastic job trains", "README.md", 200.0),
    Milestone("the submitted job has ended", "docs/cluster.md", 800.0),
)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}


def test_a_shell_keeps_what_was_typed_before(tmp_path: Path, environment: dict[str, str]) -> None:
    terminal = Terminal(tmp_path, "one", environment)
    terminal.type("here=$HOME && sleep 600 & echo begun")
    terminal.type("echo pid $! of $HOME")
    pid = int(terminal.await_words(rf"pid (\d+) of {tmp_path}\n", LIMIT_S)[1])
    os.kill(pid, 0)
    terminal.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # a window that is closed ends its programs


def test_a_command_that_fails_is_told(tmp_path: Path, environment: dict[str, str]) -> None:
    terminal = Terminal(tmp_path, "one", environment)
    terminal.type("ls no-such-file")
    with pytest.raises(RuntimeError, match=r"a command failed; 'never' is not shown\n.*no-such-file"):
        terminal.await_words("never", LIMIT_S)
    terminal.close()
    other = Terminal(tmp_path, "other", environment)
    other.type("false")
    with pytest.raises(RuntimeError, match="a command failed"):
        other.end()
    other.close()


def test_the_table_and_the_plot_have_each_milestone() -> None:
    assert is_in_time(REACHED)
    assert not is_in_time((Milestone("the first elastic job trains", "README.md", 301.0), REACHED[1]))
    assert not is_in_time((REACHED[0], Milestone("the submitted job has ended", "docs/cluster.md", 901.0)))
    assert "| 800.0 s         | 600.0 s | the submitted job has ended  | docs/cluster.md |" in told(REACHED)
    bars = KINDS["newcomer"]([{"what": m.what, "page": m.page, "at_s": m.at_s} for m in REACHED])["times"]
    assert list(bars.values.values()) == [[200.0], [800.0]]


@pytest.mark.long
def test_the_pages_lead_to_a_killed_node_and_a_submitted_job(tmp_path: Path) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository to clone")
    programs = tmp_path / "bin"
    programs.mkdir()
    path = f"{ROOT}:{ROOT / 'protos'}"
    for name, module in MODULES.items():
        (programs / name).write_text(
            f'#!/bin/sh\nPYTHONPATH={path} exec "{sys.executable}" -m {module} "$@"\n'
        )
        (programs / name).chmod(0o700)
    (programs / "etcd").symlink_to(Path(sys.executable).parent / "etcd")
    with Lab(1) as lab:
        host = lab.hosts[0]
        # It shows a node its address
        namespaces.ip("-n", host.namespace, "route", "add", "default", "dev", "eth0")
        command = [sys.executable, "-m", "benchmarks.newcomer", "--installed", str(programs)]
        process = host.run(
            command, env={**os.environ, "PYTHONPATH": path}, cwd=ROOT, output=tmp_path / "said"
        )
        assert process.wait(HANG_S) == 0, process.text()
        said = process.text()
    for words in ("that node is killed, and the other one goes on", "the submitted job has ended"):
        assert f"| {words}" in said
