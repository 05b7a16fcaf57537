"""A worker within a round: the parameters in a copy or a checkpoint have none of its local steps, and it brings none of
them when it joins again. The state of its optimizer has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import Generation, StateName
from bagua_core.algorithms import LocalSGD
from bagua_core.communication.step_interface import Used
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import entry
from bagua_core.elastic.step.engine import Engine
from bagua_core.elastic.step.late_leave_plan import FIRST_WRITE_S, Act, Form, Plan, decide
from bagua_core.parallel import DistributedDataParallel
from tests.core.elastic.agents import Agent
from tests.core.elastic.records import generation
from tests.lab.wait import HANG_S

JOINS = HealPlan(
    StateName(1, 3), (1,), frozenset(), frozenset({0}), False, "a test", newcomers=frozenset({0})
)


class InRound:
    """A worker in the middle of a round, which another generation has left out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent = Agent("w0", slots=1)
        engine = self.engine = Engine(
            WorkerEnvironment("job", "w0", "a", self.agent.socket, "127.0.0.1", 0, 1)
        )
        assert engine.member is not None and engine.copying is not None
        self.member = engine.member
        address = engine.member.rendezvous.address
        self.agent.server.tell_generation(generation(1, "w0", store_address=address))
        net = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        self.model = DistributedDataParallel(
            net, [optimizer], algorithm=LocalSGD(sync_every=4, unit="round"), engine=engine
        )
        self.loader = ElasticDataLoader(
            torch.utils.data.TensorDataset(torch.ones(64, 1)), 4, num_workers=0, engine=engine
        )
        self.replaced = 0
        monkeypatch.setattr(self.model, "state_replaced", self._count)
        monkeypatch.setattr(engine.copying, "enter", lambda *_: None)
        batches = iter(self.loader)
        for _ in range(2):
            (x,) = next(batches)
            self.model(x).sum().backward()
            optimizer.step()
        assert engine.rounds is not None and engine.rounds.has_work
        self.rounds = engine.rounds

    @property
    def weight(self) -> float:
        return float(next(self.model.parameters()).detach())

    def late_plan(self) -> Plan:
        """The plan of the thread that leaves in the script's place, with checkpoints, when the time is over."""
        assert self.engine._leaving is not None
        situation, _ = self.engine._leaving.late_situation(FIRST_WRITE_S)
        return decide(replace(situation, saves=True))

    def _count(self) -> None:
        self.replaced += 1

    def enter(self, record: Generation) -> None:
        here = {"epoch": 0, "batch": 3}
        infos = [entry.Info(StateName(), False, here), entry.Info(StateName(1, 3), False, here, kept=True)]
        self.engine.take_part(record, JOINS, infos)
        self.engine._plan_step()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[InRound]:
    made = InRound(monkeypatch)
    yield made
    made.engine._ended = True
    made.loader.close()
    made.member.close(in_order=True)
    made.agent.close()


def test_its_row_in_a_round_that_a_holder_keeps_is_empty(worker: InRound) -> None:
    worker.enter(generation(3, "w0", "w1", since={"w0": 3, "w1": 1}))
    assert worker.engine.is_round_open and worker.engine.joining
    assert not worker.rounds.has_work and worker.rounds.used() == Used(())
    assert worker.replaced == 1, "nor does an algorithm send what it kept for the model of before"


def test_a_copy_tells_the_models_that_they_were_replaced(worker: InRound) -> None:
    copied: dict[str, Any] = {
        **worker.engine.registry.capture(),
        "name": [1, 1, 0],
        "history": "[]",
        "operations": [],
        "final_parts": 0,
        "owes": [False, False],
    }
    worker.engine._swap_in(copied)
    assert worker.replaced == 1 and not worker.rounds.has_work


def test_the_parameters_that_others_copy_of_it_have_no_local_step(
    worker: InRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their book says that these samples are unused, and they lease them again if this worker is lost."""
    assert worker.engine.copying is not None
    (model,) = worker.engine.inputs.models
    local = worker.weight
    with model.at_round_begin():
        began = worker.weight
    assert local != began
    seen: list[float] = []
    monkeypatch.setattr(worker.engine.copying, "enter", lambda *_: seen.append(worker.weight))
    kept = entry.Info(StateName(1, 3), False, {"epoch": 0, "batch": 3}, kept=True)
    behind = entry.Info(StateName(1, 2), False, {"epoch": 0, "batch": 2})
    record = generation(3, "w0", "w1", since=1)
    for sources, expected in (((0,), began), ((1,), local)):
        plan = HealPlan(
            StateName(1, 3), sources, frozenset({0, 1}) - set(sources), frozenset(), False, "a test"
        )
        worker.engine.take_part(record, plan, [kept, behind])
        assert seen.pop() == expected and worker.weight == local


def test_the_resume_point_of_a_round_copies_no_gradients(worker: InRound) -> None:
    """A local step does not fail by itself, so no step is done again with them."""
    (tensors,) = worker.engine.registry.models
    assert any(p.grad is not None for p in worker.model.parameters())
    worker.engine._resume_point()
    assert tensors._gradients is None


def test_outside_the_loop_it_saves_the_model_with_which_the_round_began(
    worker: InRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Local steps are no parts of a step, however many are done."""
    leaving, checkpoints = worker.engine._leaving, worker.engine._checkpoints
    assert leaving is not None and checkpoints is not None
    local = worker.weight
    with worker.engine.at_round_begin():
        began = worker.weight
    plan = worker.late_plan()
    assert (plan.act, plan.form) == (Act.SAVE, Form.AT_RESUME_POINT)
    saved: list[tuple[float, bool]] = []
    monkeypatch.setattr(
        checkpoints, "step_aside", lambda *_, at_resume_point: saved.append((worker.weight, at_resume_point))
    )
    with worker.engine.state.guard.reading(HANG_S):
        leaving.begin_last_write(plan.form, HANG_S)
    assert saved == [(began, True)] and worker.weight == local


def test_outside_the_loop_its_model_is_left_alone_while_it_is_averaged(
    worker: InRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others would commit the distance of another model."""
    found: list[Plan] = []
    close_round = worker.model.close_round

    def closes(*arguments: Any) -> None:
        found.append(worker.late_plan())
        close_round(*arguments)

    monkeypatch.setattr(worker.model, "close_round", closes)
    worker.engine._end_step()
    assert worker.engine.state.name.step == 1
    (plan,) = found
    assert plan.act is Act.WAIT and "exchanged" in plan.reason
    assert worker.late_plan().act is Act.SAVE


@pytest.mark.parametrize(("used", "source"), [((0, 4), 1), ((4, 4), 0), ((0, 0), None)])
def test_buffers_come_from_the_first_member_that_has_samples(
    worker: InRound, monkeypatch: pytest.MonkeyPatch, used: tuple[int, ...], source: int | None
) -> None:
    """One that copied the state while another keeps a round has no statistics of it."""
    rows = [Used(((0, count),) if count else ()) for count in used]
    monkeypatch.setattr(worker.engine, "communicator", lambda: SimpleNamespace(world_size=2, global_rank=0))
    monkeypatch.setattr(worker.engine, "_exchanged", lambda *_: rows)
    closed: list[int] = []
    monkeypatch.setattr(worker.model, "close_round", lambda *arguments: closed.append(arguments[2]))
    worker.engine._close_round()
    assert closed == ([] if source is None else [source])


def test_all_shards_of_a_replica_know_it_by_one_id(worker: InRound, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds of a restored book are under the ids of shard 0."""
    monkeypatch.setattr(worker.member, "replica", SimpleNamespace(shard_rank=1, close=lambda in_order: None))
    listed = generation(3, "v0", "w0", "v1", "w1", since=3)
    members = tuple(replace(m, replica_rank=r // 2, shard_rank=r % 2) for r, m in enumerate(listed.members))
    worker.enter(replace(listed, members=members))
    assert worker.engine.plan.workers == ("v0", "v1")
