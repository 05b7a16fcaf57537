"""Divides the rewriting of assertions among the lanes of a run, before they collect the tests.

pytest rewrites the assertions of every test module and keeps the bytecode in a cache. A clean clone has no cache, and
lanes that collect the same files side by side would each rewrite all of them, which is half of what collecting costs.
A lane waits for no other: it rewrites what is not in the cache when it gets there. conftest.py takes the hook.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from _pytest.assertion import rewrite


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """As one of several lanes, rewrite every so many-th module that the run collects."""
    lane = getattr(session.config, "workerinput", None)
    if lane is not None and not sys.dont_write_bytecode:
        files = modules_of(session.config.invocation_params.dir, session.config.args)
        number = int(lane["workerid"].removeprefix("gw"))
        rewrite_all(files[number :: lane["workercount"]], session.config)


def modules_of(directory: Path, arguments: Iterable[str]) -> list[Path]:
    """The test modules that arguments of pytest name, relative to `directory`, in the order of their paths."""
    paths = [directory / argument.split("::", 1)[0] for argument in arguments]
    return sorted({file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])})


def rewrite_all(files: Iterable[Path], config: pytest.Config) -> None:
    """Write the bytecode of each file to pytest's cache, where it is not yet."""
    state = config.stash[rewrite.assertstate_key]
    for file in files:
        cached = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, cached) is None and rewrite.try_makedirs(cached.parent):
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, cached)
