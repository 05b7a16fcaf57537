"""Compiled code is kept whole, and the wait for another process that compiles it is bounded."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from bagua_core.kernels import compiled_cache
from bagua_core.kernels.compiled_cache import compile_once


class Compiler:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, fresh: Path) -> None:
        self.count += 1
        fresh.write_bytes(b"code %d" % self.count)


def test_whole_code_is_compiled_once(tmp_path: Path) -> None:
    compiler, path = Compiler(), tmp_path / "a.so"
    for _ in range(2):
        compile_once(path, compiler, timeout_s=0.0)
    assert compiled_cache.content(path) == b"code 1"


@pytest.mark.parametrize("kept_bytes", [0, 3, 20])
def test_damaged_code_is_compiled_anew_and_replaced(tmp_path: Path, kept_bytes: int) -> None:
    """After a loss of power a file may be empty, cut off, or hold zeros."""
    compiler, path = Compiler(), tmp_path / "a.so"
    compile_once(path, compiler, timeout_s=0.0)
    whole = path.read_bytes()
    for damaged in (whole[:kept_bytes], whole[:kept_bytes].ljust(len(whole), b"\0")):
        before = compiler.count
        path.write_bytes(damaged)
        for _ in range(2):
            compile_once(path, compiler, timeout_s=0.0)
        assert compiler.count == before + 1
        assert compiled_cache.content(path) == b"code %d" % compiler.count


def test_a_wait_for_another_compilation_of_the_same_code_ends(tmp_path: Path) -> None:
    compiler = Compiler()
    with open(tmp_path / "a.so.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=r"a\.so"):
            compile_once(tmp_path / "a.so", compiler, timeout_s=0.0)
        compile_once(tmp_path / "b.so", compiler, timeout_s=0.0)
    assert compiler.count == 1
    compile_once(tmp_path / "a.so", compiler, timeout_s=0.0)


def test_code_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced = tmp_path / "a.so", []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    compile_once(path, Compiler(), timeout_s=0.0)
    assert synced == [(path.stat().st_size, False)]
