"""Marks the tests of long_tests.txt as long: what they run of the product, other tests of the default suite run too.

The list was made from a run of the default suite in which every block of statements of the product was counted, in all
processes, by test. Each block of a listed test is run by another test, and each file keeps a test in the default suite.
A test that is dear and alone in what it runs is not listed: make it cheaper. Pages say which of their blocks and which
examples only listed tests run (tests/docs/test_weekly.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("long_tests.txt")


def listed() -> list[str]:
    """Returns the ids of the listed tests."""
    return [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]


def mark(items: Iterable[pytest.Item]) -> None:
    """Marks the listed ones among the tests."""
    ids = frozenset(listed())
    for item in items:
        if item.nodeid in ids:
            item.add_marker(pytest.mark.long)
