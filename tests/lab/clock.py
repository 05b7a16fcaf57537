"""A wall clock of a host's own: shifted against the machine's, and jumping while processes run.

By a small library (clock_shift.c) that the host's processes load first. It shifts CLOCK_REALTIME only, as a
wrong date does. Programs that ask the kernel without the C library, like etcd, keep the machine's time.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from tests.lab.namespaces import LabError

_SOURCE = Path(__file__).with_name("clock_shift.c")
_BUILD_TIMEOUT_S = 60.0
_SHIFT = struct.Struct("=q")  # nanoseconds


class HostClock:
    """`environment` is what a process needs to have this clock."""

    def __init__(self, library: Path, file: Path) -> None:
        file.write_bytes(_SHIFT.pack(0))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), _SHIFT.size)
        self.environment = {"LD_PRELOAD": str(library), "LAB_CLOCK_FILE": str(file)}

    def shift(self, ahead_s: float) -> None:
        """From now on it is so far ahead of the machine's clock (negative: behind), also for who runs already."""
        self._shared[:] = _SHIFT.pack(round(ahead_s * 1e9))

    def close(self) -> None:
        self._shared.close()


def why_no_clock() -> str | None:
    """Why hosts can't have clocks of their own here, or None."""
    return None if shutil.which("cc") else "a clock of a host's own needs a C compiler"


def build_library(directory: Path) -> Path:
    """The compiled library, made once a directory."""
    library = directory / "clock_shift.so"
    if not library.exists():
        if why := why_no_clock():
            raise LabError(why)
        words = ["cc", "-shared", "-fPIC", "-O2", "-Wall", "-o", str(library), str(_SOURCE), "-ldl"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise LabError(f"clock_shift.c does not compile: {done.stderr}")
    return library
