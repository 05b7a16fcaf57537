"""Compiles the CPU's library: its sources, its flags, and the digest by which a stale library is recognised.

Imports nothing beyond the standard library: setup.py loads this file by its path, before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "cpu.c"
READ_BY_IT = [HERE / name for name in ("arithmetic.h", "cpu_loops.h", "threads.h")]

# No contraction: a * b + c is rounded twice everywhere, or CPU and GPU would differ. The other two let loops
# vectorize and change no value. No -march: the library chooses among instruction sets when it runs.
COMPILE_FLAGS = [
    "-std=gnu11",
    "-O3",
    "-fPIC",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
]
LINK_FLAGS = ["-lm", "-lpthread"]
COMPILE_TIMEOUT_S = 120.0


class CompilationError(RuntimeError):
    """Raised if there is no compiler, or it failed; the message says which and how."""


def source_digest() -> str:
    """Returns a digest of sources and flags: a library with another digest was compiled from other ones. Raises
    OSError."""
    digest = hashlib.sha256(" ".join([*COMPILE_FLAGS, *LINK_FLAGS]).encode())
    for path in [SOURCE, *READ_BY_IT]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def macros() -> list[tuple[str, str]]:
    """Returns the macros of a compilation, as setuptools takes them."""
    return [("BAGUA_SOURCE", f'"{source_digest()}"')]


def find_compiler(language: str = "C", variable: str = "CC", usual: str = "cc, gcc, clang") -> list[str]:
    """Returns a compiler's command: what the variable says, else the first usual one that is there. Raises
    CompilationError."""
    named = shlex.split(os.environ.get(variable, ""))
    for words in [named] if named else [[name] for name in usual.split(", ")]:
        if shutil.which(words[0]):
            return words
    raise CompilationError(
        f"no {language} compiler ({' '.join(named) or usual}) on PATH; install one, or set {variable}"
    )


def run_compiler(command: list[str], what: str, timeout_s: float) -> None:
    """Runs a compiler's command. Raises CompilationError, which says that `what` was not compiled, or has the
    compiler's last lines."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompilationError(f"{command[0]} did not compile {what}: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-3:]
        raise CompilationError(f"{command[0]} ended with {done.returncode}: {' / '.join(last)}")


def compile_library(destination: Path) -> None:
    """Compiles the library into `destination`, a new file. Raises CompilationError."""
    defines = [f"-D{name}={value}" for name, value in macros()]
    command = [
        *find_compiler(),
        *COMPILE_FLAGS,
        *defines,
        "-shared",
        "-o",
        str(destination),
        str(SOURCE),
        *LINK_FLAGS,
    ]
    run_compiler(command, "the CPU kernels", COMPILE_TIMEOUT_S)
