"""A directory that a job names is entered with the rights of the job's account."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.start.spawn import spawn_worker
from tests.lab.wait import HANG_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change accounts")

ENTER = """
import os, sys
from bagua_agent.workers.process.account import find_account
from bagua_agent.workers.start.enter_directory import enter_as
account, groups = find_account("nobody"), os.getgroups()
try:
    enter_as(sys.argv[1], account)
except OSError as error:
    print(type(error).__name__)
else:
    print(os.getcwd())
assert (os.geteuid(), os.getuid(), os.getegid()) == (0, 0, 0) and os.getgroups() == groups, "as it was"
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that every account may enter; not tmp_path, which is root's alone."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def entered(directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", ENTER, str(directory)],
        capture_output=True, text=True, timeout=HANG_S, check=True, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    return done.stdout.strip()


def test_what_the_account_may_enter(home: Path) -> None:
    assert entered(home) == str(home)
    (home / "link").symlink_to(home)
    assert entered(home / "link") == str(home)


def test_what_only_root_may_enter_or_reach(home: Path) -> None:
    inner = home / "private" / "open"
    inner.mkdir(parents=True, mode=0o755)
    (home / "private").chmod(0o700)
    (home / "link").symlink_to(inner)
    assert [entered(path) for path in (inner, home / "link", home / "private")] == ["PermissionError"] * 3
    assert entered(home / "missing") == "FileNotFoundError"


def test_a_worker_starts_where_its_agent_is_whatever_the_name_means_by_then(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = home / "private"
    private.mkdir(mode=0o700)
    job = home / "job"
    job.mkdir(mode=0o755)
    monkeypatch.chdir(job)
    os.rename(job, home / "moved")
    job.symlink_to(private)  # as the job's account could, between two looks at the name
    worker = spawn_worker(
        WorkerCommand(CommandKind.EXECUTABLE, "/bin/pwd", ("-P",)),
        {"PATH": os.environ["PATH"]},
        worker_id="w",
        slot=0,
        gated=False,
        stdout=home / "out",
    )
    os.waitid(os.P_PIDFD, worker.pidfd, os.WEXITED | os.WNOWAIT)
    assert worker.reap() == 0
    worker.close()
    assert (home / "out").read_text().strip() == str(home / "moved")
