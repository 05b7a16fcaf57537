"""Compiles the driver with the system's C++ compiler, once for each version of its sources and each sanitizer."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYOUTS = HERE.parents[1] / "bagua_core" / "net" / "plugin"  # nccl_net.h
_COMPILE_TIMEOUT_S = 240.0
_FLAGS = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror")

# As the plugin that the driver loads is built: the runtime of a sanitizer belongs to the program.
SANITIZERS = {
    "": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-fsanitize=thread",),
}


class BuildError(RuntimeError):
    """A program of the network driver was not built; the message has the compiler's words."""


def cache_directory() -> Path:
    """The user's cache of this module; created if it is absent."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bagua-net-driver"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def driver(sanitizer: str = "") -> Path:
    """The driver program; sanitizer: a key of SANITIZERS. Raises BuildError."""
    sources = [HERE / name for name in ("driver.cc", "libnccl.cc", "plugin.cc", "stream.cc")]
    headers = [*sorted(HERE.glob("*.h")), LAYOUTS / "nccl_net.h"]
    return _program("driver", sources, headers, SANITIZERS[sanitizer])


def _program(name: str, sources: list[Path], headers: list[Path], flags: tuple[str, ...]) -> Path:
    digest = hashlib.sha256(" ".join([*_FLAGS, *flags]).encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    target = cache_directory() / f"{name}-{digest.hexdigest()[:16]}"
    with open(cache_directory() / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # its holder ends: the compiler has a deadline
        if not target.exists():
            _compile(target, sources, flags)
    return target


def _compile(target: Path, sources: list[Path], flags: tuple[str, ...]) -> None:
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        fresh = Path(scratch) / target.name
        argv = [
            compiler,
            *_FLAGS,
            *flags,
            f"-I{LAYOUTS}",
            "-o",
            str(fresh),
            *map(str, sources),
            "-ldl",
            "-pthread",
        ]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except OSError as error:
            raise BuildError(
                f"{compiler} does not start: {error}; install a C++ compiler or set CXX"
            ) from error
        if done.returncode != 0:
            raise BuildError(f"{' '.join(argv)} failed:\n{done.stderr.strip()}")
        os.rename(fresh, target)  # readers see a whole program or none
