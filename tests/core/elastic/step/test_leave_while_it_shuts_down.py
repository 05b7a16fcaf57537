"""A worker that leaves the job while its training is ended: the second call of shutdown only closes what is open."""

from __future__ import annotations

import pytest
import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import GenerationKind
from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.step.engine import Engine
from bagua_core.errors import LeaveInterrupt
from bagua_core.parallel import DistributedDataParallel
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("interrupted", "left"), [(False, SystemExit), (True, LeaveInterrupt)])
def test_a_worker_that_left_as_its_training_ended_closes_in_order(
    interrupted: bool, left: type[BaseException], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """joins: it came for a step that the job did not need any more, and waits for the job's end."""
    agent = Agent("w0", slots=1)
    engine = Engine(WorkerEnvironment("job", "w0", "a", agent.socket, "127.0.0.1", 0, 1))
    member = engine.member
    assert member is not None
    agent.server.tell_generation(generation(1, "w0", store_address=member.rendezvous.address))
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    while engine.next_step() < 2:
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    if joins:
        engine.newcomers = frozenset({engine.global_rank})
    member.break_generation(CollectiveFailed("a member was lost"))
    agent.server.tell_leave(interrupt=interrupted)
    agent.server.tell_generation(generation(2, "other", kind=GenerationKind.FAILOVER))
    with pytest.raises(left) as ending:
        engine.shutdown(0)

    closed: list[bool] = []
    close = member.close

    def noted(*, in_order: bool) -> None:
        closed.append(in_order)
        close(in_order=in_order)

    monkeypatch.setattr(member, "close", noted)
    assert engine.shutdown(130 if isinstance(ending.value, KeyboardInterrupt) else 0)
    assert closed == [True]
    agent.wait_for(lambda: "w0" in agent.ended)
    agent.close()
