"""The choice of the CPU's library: built at installation, cached, compiled on demand, or none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua_core.kernels import compilation, compiled_cache, cpu_library
from tests.lab import launched, zygote

ROOT = Path(__file__).resolve().parents[3]
CHILD_DEADLINE_S = 120


@pytest.fixture(autouse=True)
def no_installed_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment in which nothing is built yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The kernels' sources alone, without what an installation may have built beside them."""
    package = tmp_path / "checkout" / "bagua_core"
    ignore = shutil.ignore_patterns("_cpu*.so", "__pycache__")
    shutil.copytree(ROOT / "bagua_core" / "kernels", package / "kernels", ignore=ignore)
    (package / "__init__.py").touch()
    return tmp_path / "checkout"


def run(checkout: Path, tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """say_target.py, where that can be done forked from a process that has torch loaded: an import takes seconds."""
    words = [sys.executable, "-m", "tests.core.kernels.say_target", str(checkout)]
    environment = launched.environment(XDG_CACHE_HOME=str(tmp_path / "cache"), **variables)
    if zygote.can_start(words, environment):
        return zygote.run_captured(words, environment, tmp_path, "", CHILD_DEADLINE_S)
    return subprocess.run(
        words,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=CHILD_DEADLINE_S,
        check=False,
    )


def said(checkout: Path, tmp_path: Path, **variables: str) -> tuple[str, str, str, str]:
    """Target, reason, sum of the compressed tensor, what was warned of."""
    done = run(checkout, tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    name, reason, total = done.stdout.strip().split("|")
    return name, reason, total, done.stderr


def counting_compiler(tmp_path: Path) -> Mapping[str, str]:
    """A compiler that writes down that it ran, and does not optimize: that takes seconds of processor time."""
    real = shutil.which("cc") or shutil.which("gcc")
    if real is None:
        pytest.skip("no C compiler on PATH")
    script = tmp_path / "counting-cc"
    script.write_text(f'#!/bin/sh\necho ran >>"{tmp_path}/compilations"\nexec {real} "$@" -O0\n')
    script.chmod(0o755)
    return {"CC": str(script)}


def compilations(tmp_path: Path) -> int:
    return len((tmp_path / "compilations").read_text().splitlines())


def test_workers_that_start_together_compile_once(checkout: Path, tmp_path: Path) -> None:
    compiler = counting_compiler(tmp_path)
    with ThreadPoolExecutor(3) as together:
        workers = [together.submit(said, checkout, tmp_path, **compiler) for _ in range(3)]
        results = [worker.result() for worker in workers]
    cached = next((tmp_path / "cache" / "bagua-kernels").glob("cpu-*.so"))
    assert {(name, reason) for name, reason, _, _ in results} == {("extension", str(cached))}
    assert compilations(tmp_path) == 1
    assert (cached.parent.stat().st_mode & 0o777) == 0o700
    assert said(checkout, tmp_path, **compiler)[0] == "extension"
    assert compilations(tmp_path) == 1


def test_without_a_compiler_torch_serves_and_says_why_once(checkout: Path, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-cc")
    name, reason, total, warned = said(checkout, tmp_path, CC=missing)
    assert name == "fallback" and missing in reason
    assert warned.count("many times slower") == 1
    with_compiler = said(checkout, tmp_path, **counting_compiler(tmp_path))
    assert with_compiler[0] == "extension" and with_compiler[2] == total


def test_a_compiler_that_fails_is_quoted(checkout: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'internal compiler error' >&2\nexit 4\n")
    broken.chmod(0o755)
    name, reason, _, _ = said(checkout, tmp_path, CC=str(broken))
    assert name == "fallback" and "ended with 4" in reason and "internal compiler error" in reason


def test_a_demanded_extension_is_an_error_where_there_is_none(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout, tmp_path, CC=str(tmp_path / "no-such-cc"), BAGUA_KERNELS="extension")
    assert done.returncode == 1
    assert "KernelUnavailableError: BAGUA_KERNELS=extension, but no C compiler" in done.stderr


def test_a_library_of_other_sources_is_not_used(checkout: Path, tmp_path: Path) -> None:
    compiler = counting_compiler(tmp_path)
    reason = said(checkout, tmp_path, **compiler)[1]
    shutil.copy(reason, checkout / "bagua_core" / "kernels" / "_cpu.so")
    assert said(checkout, tmp_path, **compiler)[1] == "_cpu.so, built at installation"
    header = checkout / "bagua_core" / "kernels" / "arithmetic.h"
    header.write_text(header.read_text() + "\n/* changed */\n")
    again = said(checkout, tmp_path, **compiler)[1]
    assert again.startswith(str(tmp_path / "cache")) and again != reason
    assert compilations(tmp_path) == 2


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    directory = compiled_cache.cache_directory()
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(compiled_cache.LibraryUnavailableError, match="this user alone"):
        cpu_library._from_cache(directory, compilation.source_digest())
    assert list(directory.iterdir()) == []
    directory.rmdir()
    directory.symlink_to(tmp_path)
    with pytest.raises(compiled_cache.LibraryUnavailableError, match="this user alone"):
        cpu_library._from_cache(directory, compilation.source_digest())


def test_the_build_command_says_what_it_did(checkout: Path, tmp_path: Path) -> None:
    def build(**variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            **variables,
        }
        command = [sys.executable, "-m", "bagua_core.kernels.build"]
        return subprocess.run(
            command,
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=CHILD_DEADLINE_S,
            check=False,
        )

    without = build(CC=str(tmp_path / "no-such-cc"))
    assert without.returncode == 1 and "torch's operators serve" in without.stderr
    done = build(**counting_compiler(tmp_path))
    assert done.returncode == 0 and str(tmp_path / "cache") in done.stdout
