"""A step that fails behind its vote: a worker that has the step's exchange is further than one that missed it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from bagua_contract.records import StateName
from bagua_core.algorithms import (
    Algorithm,
    Decentralized,
    LocalSGD,
    LowPrecisionDecentralized,
    StreamingDiLoCo,
)
from bagua_core.communication.communicator import CollectiveFailed, Lane
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel
from tests.core.algorithms.weight_workers import Shares, Worker, train_all, world
from tests.core.communication.worlds import in_process_world, run_ranks

EVEN = Shares.even(2)
ALGORITHMS = [
    LocalSGD(sync_every=2),
    LocalSGD(sync_every=2, outer_optimizer="nesterov"),
    StreamingDiLoCo(sync_every=2, fragments=1, delay=0, alpha=0.0),
    Decentralized(),
    Decentralized(peer_selection="shift_one", communication_interval=2),
    LowPrecisionDecentralized(),
]


def two_workers(algorithm: Algorithm) -> list[Worker]:
    main, beside = world(2), in_process_world(2)
    for a, b in zip(main, beside, strict=True):
        a.lanes = {Lane.BACKGROUND: b}
    return [Worker(c, algorithm) for c in main]


def fails_behind_its_vote(worker: Worker) -> None:
    """A step whose vote is lost on rank 1 alone, and that then fails on rank 0 before its optimizer."""
    if worker.rank == 1:

        def is_missed(pair: object) -> None:
            worker.engine.reduction_failed(CollectiveFailed("lost at the vote"))

        worker.engine.reduction_done = is_missed  # type: ignore[method-assign]
    worker.model(torch.ones(2, 6)).sum().backward()
    worker.engine.failed = CollectiveFailed("a collective of the script")
    assert not worker.end_step()


def travelling(worker: Worker) -> list[torch.Tensor]:
    return list(worker.model.travelling().values())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.described)
def test_the_worker_with_the_exchange_is_further(algorithm: Algorithm) -> None:
    members = two_workers(algorithm)
    train_all(members, 2, EVEN)
    before = [worker.engine.final_exchanges for worker in members]
    run_ranks(members, fails_behind_its_vote)
    holder, behind = members
    assert not all(torch.equal(*each) for each in zip(travelling(holder), travelling(behind), strict=True))
    assert [w.engine.final_exchanges - b for w, b in zip(members, before, strict=True)] == [1, 0]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.described)
def test_a_step_without_an_exchange_moves_no_name(algorithm: Algorithm) -> None:
    members = two_workers(algorithm)

    def act(worker: Worker) -> None:
        assert worker.train(EVEN)
        before, known = [t.clone() for t in travelling(worker)], worker.engine.final_exchanges
        assert worker.train(EVEN)
        changed = not all(torch.equal(*each) for each in zip(before, travelling(worker), strict=True))
        assert worker.engine.final_exchanges == known + changed

    run_ranks(members, act)


class Script:
    """A world of one whose steps fail when the test says so."""

    def __init__(self) -> None:
        self.engine = Engine(None)
        self.net = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        algorithm = LocalSGD(sync_every=1, outer_optimizer="nesterov")
        self.model = DistributedDataParallel(self.net, [self.optimizer], algorithm, engine=self.engine)

    def step(self, fails: bool = False) -> None:
        self.engine.next_step()
        self.optimizer.zero_grad()
        self.model(torch.ones(3, 2)).sum().backward()
        if fails:
            self.engine.reduction_failed(CollectiveFailed("a collective of the script"))
        self.optimizer.step()


def test_a_name_moves_with_an_exchange_that_outlives_its_step() -> None:
    script = Script()
    script.step()
    script.step()
    script.step(fails=True)
    script.engine.next_step()
    late = script.engine.info()
    assert late.name == StateName(0, 2, 1)
    early = replace(late, name=StateName(0, 2, 0), parts=0)  # as its peer has it, which missed the vote
    assert script.engine.state.final_parts == 0, "the optimizer's step is done again"
    for outside in (False, True):
        infos = [late, early]
        plan = heal_plan.plan(
            [info.name for info in infos],
            [False, outside],
            [0, 0],
            equal_states=False,
            parts=[info.parts for info in infos],
        )
        assert (plan.holders, plan.at_once, plan.replaying) == ((0,), frozenset({1}), frozenset())


def test_a_copy_brings_that_name_and_the_next_commit_ends_it() -> None:
    script, other = Script(), Script()
    script.step()
    script.step(fails=True)
    script.engine.next_step()
    copied: dict[str, Any] = {**script.engine.registry.capture(), **script.engine.state.log()}
    other.engine.state.restore(copied, "", ())
    assert other.engine.info().name == script.engine.info().name
    assert other.engine.info().parts == script.engine.info().parts == 1
    script.step()
    script.engine.next_step()
    assert script.engine.info().parts == 0 and script.engine.info().name.operations == 0
