"""Compiles NCCL's network plugin with the system's C++ compiler, once per user and version of its sources."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

from bagua_core.kernels import compilation
from bagua_core.kernels.compiled_cache import cache_directory, check_private, compile_once

SOURCES = Path(__file__).resolve().parent / "plugin"
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared"]
# Its counters and its threads are the process's, also where NCCL unloads the plugin and loads it again. g++ gives that
# by accident, with a unique symbol of its library; other compilers don't.
FLAGS += ["-Wl,-z,nodelete"]
FILE_NAME = "libnccl-net-bagua.so"
COMPILE_TIMEOUT_S = 300.0


def library() -> Path:
    """Returns the plugin's path, and compiles the plugin if need be (half a minute).

    Raises CompilationError, LibraryUnavailableError or OSError.
    """
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.read_bytes())
    cache = cache_directory()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(cache)
    directory = cache / f"net-{digest.hexdigest()[:16]}-{platform.machine()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / FILE_NAME
    compile_once(path, compile_plugin, COMPILE_TIMEOUT_S)
    return path


def compile_plugin(destination: Path, extra_flags: Sequence[str] = ()) -> None:
    """Compiles the plugin into `destination`; `extra_flags` follow the others. Raises CompilationError."""
    command = [*find_compiler(), *FLAGS, *extra_flags]
    command += ["-o", str(destination), *map(str, sorted(SOURCES.glob("*.cc")))]
    compilation.run_compiler(command, "Bagua-Net", COMPILE_TIMEOUT_S)


def find_compiler() -> list[str]:
    """Returns the command of a C++ compiler: $CXX, else c++, g++ or clang++. Raises CompilationError."""
    return compilation.find_compiler("C++", "CXX", "c++, g++, clang++")
