"""Finds the compiled library for the CPU, or compiles it.

First the one that an installation built beside this file; then the user's cache; then it is compiled into the cache, by
one process at a time. A library of other sources than those here is never used. Knows nothing of tensors.
"""

from __future__ import annotations

import ctypes
import platform
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_core.kernels import compilation
from bagua_core.kernels.compilation import CompilationError
from bagua_core.kernels.compiled_cache import (
    LibraryUnavailableError,
    cache_directory,
    check_private,
    compile_once,
)


@dataclass(frozen=True, slots=True)
class Found:
    library: ctypes.CDLL
    where: str


def find() -> Found:
    """Returns the library, compiled if need be (seconds, once per user and version). Raises LibraryUnavailableError."""
    try:
        digest = compilation.source_digest()
    except OSError as error:
        raise LibraryUnavailableError(f"the sources of the kernels are not readable: {error}") from error
    reasons = []
    for path in sorted(compilation.HERE.glob("_cpu*.so")):
        try:
            return Found(_load(path, digest), f"{path.name}, built at installation")
        except LibraryUnavailableError as error:
            reasons.append(str(error))
    try:
        return _from_cache(cache_directory(), digest)
    except (LibraryUnavailableError, CompilationError, OSError) as error:
        reasons.append(str(error))
    raise LibraryUnavailableError("; ".join(reasons))


def _from_cache(directory: Path, digest: str) -> Found:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(directory)
    path = directory / f"cpu-{digest}-{platform.machine()}.so"
    compile_once(path, compilation.compile_library, compilation.COMPILE_TIMEOUT_S)
    return Found(_load(path, digest), str(path))


def address_of(values: array[Any]) -> int:
    """Returns the address of `values` for the library's functions; valid while a reference to `values` exists."""
    return values.buffer_info()[0]


def _load(path: Path, digest: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.bagua_source.restype = ctypes.c_char_p
        found = library.bagua_source().decode()
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path} can't be loaded: {error}") from error
    if found != digest:
        raise LibraryUnavailableError(f"{path} is stale: it was built from {found}, the sources are {digest}")
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, number, word, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
    arguments = {
        "minmax_compress": [pointer, word, number, number, number, pointer, number, word],
        "minmax_reduce": [pointer, number, number, number, number, real, pointer, word],
        "one_bit_compress": [pointer, word, number, number, number, pointer, pointer, pointer, number, word],
        "decode": [word, pointer, number, number, number, number, number, real, word, pointer, word, word],
        "weighted_average": [pointer, word, pointer, word, number, real, real, word],
        "add_difference": [pointer, word, pointer, pointer, word, number, real, word],
        "adam_steps": [pointer, word, pointer, pointer, pointer, number, real, real, real, word],
        "adam_gradients": [pointer, word, pointer, number, real, word],
        "adam_update": [pointer, word, pointer, pointer, pointer, number, real, real, real, real, word],
        "copy_parts": [number, pointer, pointer, word, pointer, word, word, word],
    }
    for name, types in arguments.items():
        function = getattr(library, f"bagua_{name}")
        function.argtypes, function.restype = types, None
    library.bagua_use_instruction_set.argtypes = [word]
    library.bagua_use_instruction_set.restype = word
    for name in ("minmax_bytes", "one_bit_bytes"):
        function = getattr(library, f"bagua_{name}")
        function.argtypes, function.restype = [number, number], number
