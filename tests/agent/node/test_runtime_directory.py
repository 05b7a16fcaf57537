"""The agent's directory is private and leaves room for the names of sockets."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd.endpoints import LONGEST_SOCKET_PATH_BYTES
from bagua_agent.node import runtime_directory as module
from bagua_agent.node.runtime_directory import (
    PREFIX,
    make_runtime_directory,
    own,
    remove_left,
    session_socket,
    store_directory,
)


@pytest.fixture
def short() -> Iterator[Path]:
    """Directly under /tmp: pytest's own directories may be as long as the ones that are avoided."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_it_is_private_and_where_temporary_files_go(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    made = make_runtime_directory()
    assert made.parent == short and stat.S_IMODE(made.stat().st_mode) == 0o700
    for path in (session_socket(made), store_directory(made)):
        assert path.parent == made and len(str(path)) < LONGEST_SOCKET_PATH_BYTES


def test_it_is_not_where_a_job_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As TMPDIR of a job, which owns it, would have it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = make_runtime_directory("trainer")
    try:
        assert made.parent == Path("/tmp") and stat.S_IMODE(made.stat().st_mode) == 0o700
    finally:
        made.rmdir()


def test_a_long_tmpdir_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    made = make_runtime_directory()
    try:
        assert len(f"{made}/{module.LONGEST_NAME}") <= LONGEST_SOCKET_PATH_BYTES
        assert not list(deep.iterdir())
    finally:
        made.rmdir()


OWNER = """
import sys, time
from pathlib import Path
from bagua_agent.node.runtime_directory import own
held = own(Path(sys.argv[1]))
print("owns", flush=True)
time.sleep(600)
"""


def left(parent: Path, name: str) -> Path:
    """A directory whose owner was killed, with a socket of it."""
    directory = parent / f"{PREFIX}{name}"
    directory.mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER, directory], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"owns\n"
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(session_socket(directory)))
        assert remove_left(parent) == [] and directory.exists(), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    return directory


def test_what_a_killed_agent_left_is_removed_by_the_next_one(short: Path) -> None:
    directory = left(short, "killed")
    mine = short / f"{PREFIX}mine"
    mine.mkdir()
    with own(mine):
        assert remove_left(short) == [directory]
        assert [path.name for path in short.iterdir()] == [mine.name]


def test_nothing_else_is_removed(short: Path) -> None:
    logs, begun, link = short / "bagua-logs", short / f"{PREFIX}begun", short / f"{PREFIX}link"
    for directory in (logs, begun):  # of another kind, and one that its agent has made this moment
        directory.mkdir()
    (logs / "owner").touch()
    elsewhere = left(short, "killed").rename(short / "elsewhere")
    link.symlink_to(elsewhere)
    assert remove_left(short) == []
    assert all(path.exists() for path in (logs, begun, link, elsewhere))


def test_a_server_that_still_answers_keeps_its_directory(short: Path) -> None:
    directory = left(short, "served")
    with socket.socket(socket.AF_UNIX) as server:
        store_directory(directory).mkdir()
        server.bind(str(store_directory(directory) / "client:1"))
        server.listen()
        assert remove_left(short) == []
    assert remove_left(short) == [directory]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another account")
def test_another_accounts_directory_stays(short: Path) -> None:
    directory = left(short, "theirs")
    os.chown(directory, 65534, 65534)
    assert remove_left(short) == [] and directory.exists()
