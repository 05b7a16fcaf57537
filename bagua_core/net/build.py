"""Compiles NCCL's network plugin with the system's C++ compiler, once per user and version of its sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.cpu_library import cache_directory, check_private

SOURCES = Path(__file__).resolve().parent / "plugin"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared"]
FILE_NAME = "libnccl-net-bagua.so"
COMPILE_TIMEOUT_S = 300.0


def library() -> Path:
    """The plugin, compiled if need be (half a minute). Raises CompilationError, LibraryUnavailableError or OSError."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    cache = cache_directory()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(cache)
    directory = cache / f"net-{digest.hexdigest()[:16]}-{platform.machine()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / FILE_NAME
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder ends: the compiler has a deadline
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                fresh = Path(scratch) / FILE_NAME
                compile_plugin(fresh)
                os.rename(fresh, path)  # readers see a whole library or none
    return path


def compile_plugin(destination: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compile the plugin into `destination`; `extra_flags` follow the others. Raises CompilationError."""
    command = [*find_compiler(), *FLAGS, *extra_flags]
    command += ["-o", str(destination), *map(str, sorted(SOURCES.glob("*.cc")))]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(f"{command[0]} did not compile Bagua-Net: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-3:]
        raise CompilationError(f"{command[0]} ended with {done.returncode}: {' / '.join(last)}")


def find_compiler() -> list[str]:
    """The command of a C++ compiler: $CXX, else c++, g++ or clang++. Raises CompilationError."""
    named = shlex.split(os.environ.get("CXX", ""))
    for words in [named] if named else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(words[0]):
            return words
    wanted = " ".join(named) or "c++, g++ or clang++"
    raise CompilationError(f"no C++ compiler ({wanted}) on PATH; install one (apt install g++), or set CXX")
