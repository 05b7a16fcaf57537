"""Compiles the driver, the relay, and the plugin under a sanitizer, once for each version of their sources."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from bagua_core.kernels import compilation
from bagua_core.kernels.compiled_cache import compile_once
from bagua_core.net import build as net

HERE = Path(__file__).resolve().parent
SABOTAGE = HERE / "sabotage.cc"
_COMPILE_TIMEOUT_S = 600.0
_FLAGS = ("-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", f"-I{net.SOURCES}")

# Of the driver and of the plugin that it loads: the runtime of a sanitizer belongs to the program. Not optimized, and
# with lines alone for a debugger: to compile takes longer than to run, twice as long with more of both.
SANITIZERS = {
    "": (),
    "address": ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "thread": ("-O0", "-g1", "-fsanitize=thread"),
}


def cache_directory() -> Path:
    """The user's cache of this module; created if it is absent."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    directory = (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "bagua-net-driver"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory


def driver(sanitizer: str = "") -> Path:
    """The driver program; sanitizer: a key of SANITIZERS. Raises CompilationError and OSError."""
    sources = [HERE / name for name in ("driver.cc", "libnccl.cc", "plugin.cc", "stream.cc")]
    flags = (*_FLAGS, *SANITIZERS[sanitizer])
    target = _target("driver", flags, [*sources, *HERE.glob("*.h"), net.SOURCES / "nccl_net.h"])
    what = "the driver of NCCL's network interface"
    compile_once(target, lambda fresh: _compile(fresh, sources, flags, what), _COMPILE_TIMEOUT_S)
    return target


def relay() -> Path:
    """The program of benchmarks/relay.py. Raises CompilationError and OSError."""
    source = HERE.parent / "relay_forwarder.cc"
    target = _target("relay", _FLAGS, [source])
    compile_once(target, lambda fresh: _compile(fresh, [source], _FLAGS, "the relay"), _COMPILE_TIMEOUT_S)
    return target


def plugin(sanitizer: str) -> Path:
    """The plugin for `driver(sanitizer)`, with the faults of sabotage.cc. Raises CompilationError and OSError."""
    flags = (*SANITIZERS[sanitizer], f"-I{net.SOURCES}", str(SABOTAGE))
    target = _target("plugin", flags, [SABOTAGE, *net.SOURCES.iterdir()])
    compile_once(target, lambda fresh: net.compile_plugin(fresh, flags), net.COMPILE_TIMEOUT_S)
    return target


def _target(name: str, flags: Sequence[str], read: Iterable[Path]) -> Path:
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted(read):
        digest.update(path.read_bytes())
    return cache_directory() / f"{name}-{digest.hexdigest()[:16]}"


def _compile(fresh: Path, sources: list[Path], flags: Sequence[str], what: str) -> None:
    command = [*net.find_compiler(), *flags, "-o", str(fresh), *map(str, sources), "-ldl", "-pthread"]
    compilation.run_compiler(command, what, _COMPILE_TIMEOUT_S)
