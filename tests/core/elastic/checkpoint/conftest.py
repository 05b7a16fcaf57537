"""No writer's thread outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.elastic.checkpoint import checkpoint_worlds


@pytest.fixture(autouse=True)
def writers_end() -> Iterator[None]:
    checkpoint_worlds.made.clear()
    yield
    assert all(
        rank.checkpointer.writer.close(checkpoint_worlds.DEADLINE_S) for rank in checkpoint_worlds.made
    )
