"""The transports that the contract suite runs over, and a world of ranks over each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from bagua_core.communication.communicator import (
    Communicator,
)
from tests.communicators.transports import TRANSPORTS, Transport, World
from tests.core.communication.nccl_worlds import (
    skip_without_nccl,
)


@pytest.fixture(params=[pytest.param(n, marks=pytest.mark.gpu if n == "nccl" else ()) for n in TRANSPORTS])
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "nccl":
        skip_without_nccl()
    return TRANSPORTS[request.param]


@pytest.fixture
def world(transport: Transport) -> Iterator[World]:
    made: list[Communicator] = []

    def build(world_size: int) -> Sequence[Communicator]:
        members = transport.build(world_size)
        made.extend(members)
        return members

    yield build
    if not transport.late_end:
        for communicator in made:
            communicator.abort("the test is over")
