"""Only a job's account and the operators' group may read its workers' output."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.workers.output.log_access import open_file
from bagua_agent.workers.output.log_file import LogFile
from bagua_agent.workers.output.log_layout import LogLayout
from bagua_agent.workers.process.account import Account

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change users")

OPERATORS, OTHERS = 54321, 54322
JOB = Account("job", 54323, 54324, (54324,), "/", "/bin/sh")


@pytest.fixture
def logs() -> Iterator[Path]:
    """A log directory as systemd makes it, given to the operators' group."""
    with tempfile.TemporaryDirectory(prefix="bagua-logs-") as made:
        os.chmod(made, 0o751)
        os.chown(made, 0, OPERATORS)
        yield Path(made)


def may_read(path: Path, uid: int, gid: int) -> bool:
    """Tried by a process of that user, not computed from modes."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            os.close(os.open(path, os.O_RDONLY))
            code = 0
        except PermissionError:
            code = 1
        finally:
            os._exit(code)
    return {0: True, 1: False}[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]


def test_only_the_account_and_the_operators_read_it(logs: Path) -> None:
    umask = os.umask(0)
    try:
        layout = LogLayout(logs, "job", "node", JOB)
        files = layout.make_worker_directory(0, "w0")
        LogFile(files.stdout, JOB).close()
        os.close(open_file(files.error, JOB, new=True))
    finally:
        os.umask(umask)
    for path in (files.stdout, files.error):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        assert may_read(path, JOB.uid, JOB.gid)
        assert may_read(path, 54325, OPERATORS)
        assert not may_read(path, 54325, OTHERS)
        assert not may_read(path, 65534, 65534)
    for directory in (files.directory, layout.node_directory, layout.node_directory.parent):
        assert may_read(directory, 54325, OPERATORS) and not may_read(directory, 54325, OTHERS)
        assert directory.stat().st_uid == 0, "or the account could put links there"


@pytest.mark.parametrize("odd", ["a file of another user", "a file with two names", "a link", "a FIFO"])
def test_what_lies_in_the_place_of_a_log_is_not_taken_for_one(logs: Path, odd: str) -> None:
    path, other = logs / "stdout.log", logs / "other"
    other.write_text("kept")
    if odd == "a file of another user":
        path.write_text("kept")
        os.chown(path, OTHERS, OTHERS)
    elif odd == "a file with two names":
        path.hardlink_to(other)
    elif odd == "a link":
        path.symlink_to(other)
    else:
        os.mkfifo(path)
    with pytest.raises(OSError):
        open_file(path, JOB)
    assert other.read_text() == "kept" and other.stat().st_uid == 0


@pytest.mark.parametrize("odd", ["a link", "a directory of another user"])
def test_a_directory_that_is_not_the_agents_own_is_not_used(logs: Path, odd: str) -> None:
    """As where every account may make directories."""
    elsewhere = logs / "elsewhere"
    elsewhere.mkdir()
    if odd == "a link":
        (logs / "job").symlink_to(elsewhere)
    else:
        (logs / "job").mkdir()
        os.chown(logs / "job", OTHERS, OTHERS)
    with pytest.raises(UserError, match="is not the agent's own"):
        LogLayout(logs, "job", "node", JOB).make_worker_directory(0, "w0")
    assert not list(elsewhere.iterdir()) and not list((logs / "job").iterdir())
