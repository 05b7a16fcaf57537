"""A worker reports the epoch of its newest committed step, and not that of the step after it."""

from __future__ import annotations

import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation

EPOCHS, BATCHES, BATCH = 2, 3, 4


def test_the_last_step_is_of_the_last_epoch() -> None:
    agent = Agent("w0", slots=1)
    engine = Engine(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1))
    member = engine.member
    assert member is not None
    agent.server.tell_generation(generation(1, "w0", store_address=member.rendezvous.address))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    data = torch.utils.data.TensorDataset(torch.ones(BATCHES * BATCH, 1))
    loader = ElasticDataLoader(data, BATCH, engine=engine)
    for _ in loader.epochs(EPOCHS):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
    engine.shutdown(0)
    agent.wait_for(lambda: "w0" in agent.ended)
    reported = {m.progress.step: m.progress.epoch for m in agent.said_by("w0") if m.HasField("progress")}
    assert reported[EPOCHS * BATCHES] == EPOCHS - 1
    assert all(epoch == (step - 1) // BATCHES for step, epoch in reported.items())
    loader.close()
    agent.close()
