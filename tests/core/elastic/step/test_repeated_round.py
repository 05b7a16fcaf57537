"""A round whose average is repeated: what its local steps count as, and when it is confirmed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import GenerationKind
from bagua_contract.time_use import STEP_TIME_BOUNDS_S
from bagua_core import tracing
from bagua_core.algorithms import LocalSGD
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation

ROUNDS, STEPS, BATCH, STEP_S = 2, 4, 4, 0.07
ROUND_S = STEPS * STEP_S


class InRounds:
    """A worker whose closes number `first` to `last` fail; each time another generation follows."""

    def __init__(self, first: int, last: int) -> None:
        self.agent = Agent("w0", slots=1)
        self.engine = Engine(WorkerEnvironment("job", "w0", "a", self.agent.socket, "127.0.0.1", 0, 1))
        assert self.engine.member is not None
        self.address = self.engine.member.rendezvous.address
        self.agent.server.tell_generation(generation(1, "w0", store_address=self.address))
        net = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        algorithm = LocalSGD(sync_every=STEPS, unit="round")
        self.model = DistributedDataParallel(net, [self.optimizer], algorithm=algorithm, engine=self.engine)
        data = torch.utils.data.TensorDataset(torch.ones(ROUNDS * STEPS * BATCH, 1))
        self.loader = ElasticDataLoader(data, BATCH, engine=self.engine)
        self._failing = range(first, last + 1)
        self._closed = 0
        model = self.engine.inputs.models[0]
        self._close_round, model.close_round = model.close_round, self._closes  # type: ignore[method-assign]

    def _closes(self, *arguments: Any) -> None:
        self._closed += 1
        if self._closed not in self._failing:
            self._close_round(*arguments)
            return
        again = generation(
            self._closed - self._failing[0] + 2,
            "w0",
            kind=GenerationKind.FAILOVER,
            store_address=self.address,
        )
        self.agent.server.tell_generation(again)
        raise CollectiveFailed("a member was lost")

    def train(self, x: torch.Tensor) -> None:
        self.model(x).sum().backward()
        self.optimizer.step()

    def close(self) -> None:
        assert self.engine.member is not None
        self.engine._ended = True
        self.loader.close()
        self.engine.member.close(in_order=True)
        self.agent.close()


@pytest.fixture
def in_rounds() -> Iterator[Callable[[int, int], InRounds]]:
    made: list[InRounds] = []

    def make(first: int, last: int) -> InRounds:
        made.append(InRounds(first, last))
        return made[-1]

    yield make
    for worker in made:
        worker.close()


@pytest.mark.parametrize("failures", [1, 2])
def test_local_steps_count_as_steps_where_their_average_is_repeated(
    failures: int, in_rounds: Callable[[int, int], InRounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    laps: list[str] = []
    monkeypatch.setattr(tracing, "lap", lambda name, value: laps.append(name))
    worker = in_rounds(2, 1 + failures)  # the first round is averaged, and the last try of the second one
    for (x,) in worker.loader:
        time.sleep(STEP_S)
        worker.train(x)
    worker.engine.shutdown(0)
    agent = worker.agent
    agent.wait_for(lambda: "w0" in agent.ended)
    progress = [m.progress for m in agent.said_by("w0") if m.HasField("progress")][-1]
    assert (progress.step, progress.generation) == (ROUNDS, 1 + failures)
    assert "failover" in progress.spent_s, "no average failed"
    assert progress.spent_s["failed_step"] < ROUND_S / 4
    assert progress.spent_s["step"] >= ROUNDS * ROUND_S
    assert progress.step_sum_s >= ROUNDS * ROUND_S and progress.computing_s >= ROUNDS * ROUND_S
    assert laps.count(tracing.STEP) == ROUNDS and laps.count(tracing.NOT_AVERAGED) == failures
    assert tracing.ROLLED_BACK not in laps
    short = sum(bound < ROUND_S for bound in STEP_TIME_BOUNDS_S)
    assert sum(progress.step_counts) == ROUNDS and not any(progress.step_counts[:short])


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_round_that_is_averaged_at_last_is_confirmed_as_asked(
    failures: int, in_rounds: Callable[[int, int], InRounds]
) -> None:
    worker = in_rounds(1, failures)
    for (x,) in worker.loader:
        worker.train(x)
        assert worker.loader.end_step(confirmed=True)
        break
    name = worker.engine.state.name
    assert (name.generation, name.step, name.operations) == (1 + failures, 1, 1)
