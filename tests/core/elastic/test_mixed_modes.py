"""A script that makes torch's default process group after it has opened a session raises at its next boundary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from bagua_contract.environment import WorkerEnvironment
from bagua_core.elastic.script_collectives.default_group import MixedModesError
from bagua_core.elastic.step.engine import Engine
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent("w0", slots=1)
    yield agent
    agent.close()


@pytest.fixture
def default_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_the_next_boundary_says_so(agent: Agent, default_group: None) -> None:
    engine = Engine(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1))
    member = engine.member
    assert member is not None
    agent.server.tell_generation(generation(1, "w0", store_address=member.rendezvous.address))
    assert engine.boundary().generation == 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(MixedModesError, match="call only one of the two"):
        engine.boundary()
    assert member.communicator is not None
    member.communicator.abort("the test is over")
    member.session.close()


def test_a_script_that_was_not_launched_may_have_one(default_group: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert Engine(None).boundary().world_size == 1
