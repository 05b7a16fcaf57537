"""The agent's directory is private and leaves room for the names of sockets."""

from __future__ import annotations

import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua_agent.etcd.endpoints import LONGEST_SOCKET_PATH_BYTES
from bagua_agent.node import runtime_directory as module
from bagua_agent.node.runtime_directory import make_runtime_directory, session_socket, store_directory


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
    monkeypatch.setattr(
        tempfile, "tempdir", str(tmp_path)
    )  # as TMPDIR of a job, which owns it, would have it
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
