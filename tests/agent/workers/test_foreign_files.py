"""A file that a worker wrote or a submitter named is read only if it is an ordinary file of bounded size."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from bagua_agent.workers.process.foreign_files import UnusableFile, read_ordinary


def test_an_ordinary_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    assert read_ordinary(path, 100) == b"x" * 100
    assert read_ordinary(path) == b"x" * 100


def test_one_that_is_larger_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnusableFile, match="it has 1099511627776 bytes, more than 1048576"):
        read_ordinary(path)


def test_one_that_grows_without_end_is_refused(tmp_path: Path) -> None:
    """Its size is said to be 0, as of one that grows between the look and the reading."""
    path = Path("/proc/self/smaps")
    assert path.stat().st_size == 0
    with pytest.raises(UnusableFile, match="it grew beyond 100 bytes"):
        read_ordinary(path, 100)


@pytest.mark.parametrize("kind", ["FIFO", "socket", "character device", "directory", "symbolic link"])
def test_what_is_none_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "symbolic link":
        (tmp_path / "file").write_bytes(b"")
        path.symlink_to(tmp_path / "file")
    else:
        path = Path("/dev/zero")
    with pytest.raises(UnusableFile, match=f"it is a {kind}, no ordinary file"):
        read_ordinary(path)


def test_links_that_a_person_gave_are_followed_to_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "good").symlink_to("file")
    (tmp_path / "bad").symlink_to("/dev/zero")
    assert read_ordinary(tmp_path / "good", follow_links=True) == b"x"
    with pytest.raises(UnusableFile, match="character device"):
        read_ordinary(tmp_path / "bad", follow_links=True)
    with pytest.raises(FileNotFoundError):
        read_ordinary(tmp_path / "missing")
