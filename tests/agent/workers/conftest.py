"""Fixtures of the tests with real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.workers.worker_lab import Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    made = Workers(tmp_path)
    yield made
    made.clean_up()
