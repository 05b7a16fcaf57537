"""A world of one NCCL communicator over a GPU that notes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.core.communication.nccl.noting_gpu import One


@pytest.fixture
def one() -> Iterator[One]:
    made = One()
    yield made
    made.communicator.abort("the test is over")
