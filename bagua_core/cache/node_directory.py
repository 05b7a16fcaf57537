"""Provides the directory that a node's processes share; it exists as long as a process uses it.

Every process that uses it holds a shared lock on one file in it; the kernel lets go of it however the process ends.
A process that gets that lock exclusively knows that no other uses the directory: the last one to leave removes it,
and each process that enters removes directories whose users were all killed. Only this user may enter, and no
symbolic link is followed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from bagua_core.cache.errors import StoreFault

_USERS = "users"
_REMOVED = ".removed-"
_WITHIN_S = 5.0  # others hold the lock alone only for a rename
_ASK_EVERY_S = 0.01


def base_of(room: Path) -> Path:
    """Returns the directory of all caches of this user in `room`."""
    return room / f"bagua-cache-{os.geteuid()}"


class NodeDirectory:
    """Registers this process as one user of a directory. Not for a forked child, which enters by itself."""

    def __init__(self, path: Path, users: int) -> None:
        self.path = path
        self._users: int | None = users
        self._pid = os.getpid()

    def leave(self) -> bool:
        """Gives up the use; the last user removes the directory. Returns whether this was the last."""
        users, self._users = self._users, None
        if users is None:
            return False
        if self._pid != os.getpid():
            os.close(users)  # the parent's lock is on the same open file, and stays
            return False
        last = False
        try:
            if _take(users, fcntl.LOCK_EX):
                last = _is_at(users, self.path / _USERS)
                if last:
                    _remove(self.path)
                    with contextlib.suppress(OSError):  # there are others
                        self.path.parent.rmdir()
        finally:
            os.close(users)
        return last


def enter(base: Path, name: str) -> NodeDirectory:
    """Enters the directory `name` in `base` as a user; creates it with mode 0700 if it is not there.

    What is in it from earlier users of the same name stays: the name says that it is the same run.
    Raises OSError, and StoreFault where others could write.
    """
    path = base / name
    deadline = time.monotonic() + _WITHIN_S
    while True:
        users = -1
        try:
            for directory in (base, path):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(directory, 0o700)
                _require_private(directory)
            sweep(base, spare=name)
            users = os.open(path / _USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if _take(users, fcntl.LOCK_SH) and _is_at(users, path / _USERS):
                return NodeDirectory(path, users)
        except FileNotFoundError:
            if not base.parent.is_dir():
                raise
            # else removed between two calls: it is made anew
        except OSError:
            if users >= 0:
                os.close(users)
            raise
        if users >= 0:
            os.close(users)
        if time.monotonic() > deadline:
            raise StoreFault("directory", f"{path} is held by its remover for more than {_WITHIN_S:g} s")
        time.sleep(_ASK_EVERY_S)


def sweep(base: Path, spare: str = "") -> list[Path]:
    """Removes the directories that no process uses, and returns them."""
    gone = []
    for path in base.iterdir():
        if path.name == spare or path.is_symlink() or not path.is_dir():
            continue
        if path.name.startswith(_REMOVED):
            # The process that renamed it was killed before it removed it
            shutil.rmtree(path, ignore_errors=True)
            continue
        try:
            users = os.open(path / _USERS, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # about to be made or removed by another
        try:
            if _take(users, fcntl.LOCK_EX) and _is_at(users, path / _USERS):
                _remove(path)
                gone.append(path)
        finally:
            os.close(users)
    return gone


def lock_within(descriptor: int, within_s: float) -> None:
    """Takes the lock exclusively. Raises StoreFault if another process keeps it for `within_s`."""
    deadline = time.monotonic() + within_s
    while not _take(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            raise StoreFault("lock", f"another process has held the cache's lock for {within_s:g} s")
        time.sleep(_ASK_EVERY_S)


def _take(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Tells whether the locked file is still the one at `path`, which others would lock."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _remove(path: Path) -> None:
    # renamed first: a process that enters meanwhile makes a new one, and freeing gigabytes takes a while
    away = path.with_name(f"{_REMOVED}{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        path.rename(away)
    except FileNotFoundError:
        return
    shutil.rmtree(away, ignore_errors=True)


def _require_private(path: Path) -> None:
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StoreFault(
            "directory",
            f"{path} is not a directory of this user alone (mode 0700); remove it, or choose directory=",
        )
