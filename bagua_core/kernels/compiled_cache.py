"""Keeps compiled code in the user's cache, compiled by one process at a time. Knows neither compilers nor languages."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from bagua_core.errors import BaguaError


class LibraryUnavailableError(BaguaError, RuntimeError):
    """Raised if no library fits; the message holds every reason."""


def cache_directory() -> Path:
    """Returns the directory of code compiled on demand; not created here."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bagua-kernels"


def check_private(directory: Path) -> None:
    """Checks that only this user can write to `directory`, for code from there is run here. Raises
    LibraryUnavailableError."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise LibraryUnavailableError(
            f"{directory} is not a directory that this user alone can write to; remove it or set XDG_CACHE_HOME"
        )


def compile_once(path: Path, compile_into: Callable[[Path], object]) -> None:
    """Makes `path` by compile_into(a new file), once among all processes. Raises OSError and what compile_into does."""
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder ends: the compiler has a deadline
        if path.exists():
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            compile_into(fresh)
            os.rename(fresh, path)  # readers see a whole file or none
