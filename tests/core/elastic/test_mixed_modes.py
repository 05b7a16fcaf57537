"""A script that makes torch's default process group after it has opened a session raises at its next boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from bagua_contract.environment import WorkerEnvironment
from bagua_core.elastic.script_collectives.default_group import MixedModesError, explain_missing_group
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


@pytest.mark.parametrize("call", [dist.get_rank, lambda: DistributedSampler([1, 2]), dist.barrier])
def test_a_call_of_torchs_group_names_what_replaces_it(call: Callable[[], object]) -> None:
    with pytest.raises((ValueError, RuntimeError)) as raised:
        call()
    explain_missing_group(raised.value)
    assert any("bagua.ElasticDataLoader" in note for note in raised.value.__notes__)
    other = ValueError("of the script's own")
    explain_missing_group(other)
    assert not hasattr(other, "__notes__")
