"""The time of local steps whose average is repeated: it is time of steps, and the repeated round has it."""

from __future__ import annotations

import time
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


@pytest.mark.parametrize("failures", [1, 2])
def test_local_steps_count_as_steps_where_their_average_is_repeated(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    laps: list[str] = []
    monkeypatch.setattr(tracing, "lap", lambda name, value: laps.append(name))
    agent = Agent("w0", slots=1)
    engine = Engine(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1))
    member = engine.member
    assert member is not None
    address = member.rendezvous.address
    agent.server.tell_generation(generation(1, "w0", store_address=address))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm = LocalSGD(sync_every=STEPS, unit="round")
    model = DistributedDataParallel(net, [optimizer], algorithm=algorithm, engine=engine)
    data = torch.utils.data.TensorDataset(torch.ones(ROUNDS * STEPS * BATCH, 1))
    loader = ElasticDataLoader(data, BATCH, engine=engine)
    close_round, closed = engine.inputs.models[0].close_round, 0

    def fail(*arguments: Any) -> None:
        nonlocal closed
        closed += 1
        if not 1 < closed <= 1 + failures:  # the first round, and the last try of the second one
            close_round(*arguments)
            return
        again = generation(closed, "w0", kind=GenerationKind.FAILOVER, store_address=address)
        agent.server.tell_generation(again)
        raise CollectiveFailed("a member was lost")

    engine.inputs.models[0].close_round = fail  # type: ignore[method-assign]
    for (x,) in loader:
        time.sleep(STEP_S)
        model(x).sum().backward()
        optimizer.step()
    engine.shutdown(0)
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
    loader.close()
    agent.close()
