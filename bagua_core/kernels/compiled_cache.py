"""Keeps compiled code in the user's cache, compiled by one process at a time. Knows neither compilers nor languages."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bagua_core.errors import BaguaError

_DIGEST_BYTES = hashlib.sha256().digest_size
_POLL_S = 0.05


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


def compile_once(path: Path, compile_into: Callable[[Path], object], timeout_s: float) -> None:
    """Makes `path` by compile_into(a new file), once among all processes, unless it is there and whole.

    timeout_s: how long another process may take for it, then TimeoutError is raised. Raises OSError and what
    compile_into does.
    """
    if content(path) is not None:
        return
    with _locked(path.with_name(path.name + ".lock"), timeout_s):
        if content(path) is not None:
            return
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            fresh = Path(scratch) / path.name
            compile_into(fresh)
            with open(fresh, "r+b") as file:
                file.write(hashlib.sha256(file.read()).digest())
                file.flush()
                os.fsync(file.fileno())  # else a loss of power may leave the name with an empty file
            os.rename(fresh, path)  # readers see a whole file or none


def content(path: Path) -> bytes | None:
    """Returns the code at `path`; None if there is none, or it is not whole.

    Behind the code is its digest. Loaders of libraries and programs ignore what follows these.
    """
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    code = kept[:-_DIGEST_BYTES]
    return code if kept[-_DIGEST_BYTES:] == hashlib.sha256(code).digest() else None


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with open(path, "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"another process has held {path} for {timeout_s:g} s, to compile"
                    ) from None
            time.sleep(_POLL_S)
        yield
