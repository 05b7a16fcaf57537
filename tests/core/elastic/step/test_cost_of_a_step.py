"""How many Python functions a small step of a launched worker calls: a cost that does not depend on the machine."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import bagua_core as bagua
from bagua_contract.environment import WorkerEnvironment
from bagua_core.elastic.step.engine import Engine
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation

WARM_UP = 40  # steps: the first ones keep copies, and measure buckets
COUNTED = 31
BATCH, WIDTH = 4, 16
MOST_CALLS = {"next-step": 430, "loader": 475}
"""Of a step beyond those of the bare loop: some more than were counted on 2026-12-01 (Python 3.11, torch 2.13)."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    agent = Agent("w0", slots=1)
    made = Engine(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1))
    assert made.member is not None
    agent.server.tell_generation(generation(1, "w0", store_address=made.member.rendezvous.address))
    yield made
    if made.member.communicator is not None:
        made.member.communicator.abort("the test is over")
    made.member.session.close()
    agent.close()


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
    return net, torch.optim.SGD(net.parameters(), lr=0.001)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()


def calls_of(step: Callable[[], None]) -> float:
    """Returns the median of the Python functions that this thread calls in each step: progress goes out by time."""
    calls = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(WARM_UP):
        step()
    found = []
    for _ in range(COUNTED):
        calls = 0
        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        found.append(calls)
    return statistics.median(found)


@pytest.mark.parametrize("loop", ["next-step", "loader"])
def test_a_small_step_calls_few_functions_more_than_the_bare_loop(engine: Engine, loop: str) -> None:
    net, optimizer = small()
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer], engine=engine)
    x, y = torch.randn(1000, WIDTH), torch.randn(1000, 1)
    loader = bagua.ElasticDataLoader(TensorDataset(x, y), global_batch_size=BATCH, engine=engine)
    batches = iter(loader)

    def with_loader() -> None:
        train(model, optimizer, *next(batches))

    def with_next_step() -> None:
        engine.next_step()
        train(model, optimizer, x[:BATCH], y[:BATCH])

    bare_net, bare_optimizer = small()
    bare = calls_of(lambda: train(bare_net, bare_optimizer, x[:BATCH], y[:BATCH]))
    calls = calls_of(with_loader if loop == "loader" else with_next_step)
    assert engine.state.name.step >= WARM_UP, "the steps are committed"
    more = calls - bare
    assert more <= MOST_CALLS[loop], (
        f"a step calls {more:.0f} Python functions more than the bare loop, {MOST_CALLS[loop]} at most: what takes the "
        "step's time is what is done in each of them. Do it once, where a generation or a registration changes it"
    )
