"""Fixtures for tests in the lab; a conftest.py takes them with `from tests.lab.fixtures import make_lab`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from tests.lab import namespaces
from tests.lab.network import Lab

MakeLab = Callable[[int], Lab]

_why_not = cache(namespaces.unavailable)


@pytest.fixture
def make_lab(tmp_path: Path) -> Iterator[MakeLab]:
    """Labs of as many hosts as asked for, closed with the test; skips where there can be none."""
    if reason := _why_not():
        pytest.skip(reason)
    with ExitStack() as labs:
        numbers = count()

        def make(hosts: int = 3) -> Lab:
            directory = tmp_path / f"lab-{next(numbers)}"
            directory.mkdir()
            return labs.enter_context(Lab(hosts, directory))

        yield make


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    """A lab of three hosts."""
    return make_lab(3)
