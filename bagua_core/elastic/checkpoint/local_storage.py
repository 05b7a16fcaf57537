"""Stores checkpoints in a directory of this host, or in one that all hosts mount.

A file is written under another name, synced to the disk, then renamed: a file of the right name is complete unless the
disk is at fault.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

_CHUNK_BYTES = 16 << 20

EDGES = ("opened", "piece 1", "piece 2", "piece 3", "synced", "renamed", "directory synced")
"""Where a process may die while it writes three pieces; `write` calls `at_edge` with each."""


class LocalStorage:
    """The `Storage` (storage.py) in a directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __str__(self) -> str:
        return str(self._root)

    def prepare(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)

    def entries(self, directory: str = "") -> list[str]:
        return os.listdir(self._root / directory)

    def open(self, name: str) -> io.BufferedReader:
        """Opens a file at once, whatever lies there."""
        # O_NONBLOCK: a FIFO without a writer blocks else
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "it is no ordinary file", str(self._root / name))
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise

    def write(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        at_edge: Callable[[str], None] = lambda edge: None,
    ) -> None:
        target = self._root / name
        self._make(target.parent)
        # Two workers may write one part: after a loss each that is left writes the whole state.
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.writing")
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                at_edge("opened")
                for number, piece in enumerate(pieces, 1):
                    _write_all(descriptor, piece)
                    at_edge(f"piece {number}")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            at_edge("synced")
            os.rename(partial, target)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        at_edge("renamed")
        _sync_directory(target.parent)
        at_edge("directory synced")

    def _make(self, directory: Path) -> None:
        """Makes a directory, but not the root: an unmounted disk must not be replaced by a directory."""
        if directory != self._root and not directory.is_dir():
            directory.mkdir(exist_ok=True)
            _sync_directory(self._root)

    def remove_directory(self, directory: str) -> None:
        doomed = self._root / directory
        for name in sorted(os.listdir(doomed)):
            if not (doomed / name).is_dir():
                (doomed / name).unlink(missing_ok=True)
        shutil.rmtree(doomed)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view[:_CHUNK_BYTES]) :]


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
