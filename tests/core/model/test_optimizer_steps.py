"""Ranks that disagree whether their optimizers step raise at the next reduction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed, Communicator
from bagua_core.communication.reduction.step_counts import OptimizerStepsDiffer
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.model.optimizer_steps import optimizer_steps_of
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded


class Worker:
    def __init__(self, communicator: Communicator, dtype: torch.dtype = torch.float32) -> None:
        self.engine = FakeEngine(communicator)
        self.rank = communicator.global_rank
        inner = seeded(lambda: nn.Linear(4, 2)).to(dtype)
        self.dtype = dtype
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        self.model = DistributedDataParallel(inner, [self.optimizer], engine=self.engine)

    def draw(self, steps: int = 1) -> None:
        """A step of the job with so many optimizer steps."""
        self.model(torch.ones(3, 4, dtype=self.dtype)).sum().backward()
        for _ in range(steps):
            self.optimizer.step()
        self.end_step()

    def end_step(self) -> None:
        if self.engine.step_failed:
            self.model.step_rolled_back()
            return
        self.model.step_committed()
        self.engine.step += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("build", [in_process_world, gloo_world])
def test_a_rank_that_did_not_step_is_named_on_all_ranks(build: object, dtype: torch.dtype) -> None:
    members = [Worker(c, dtype) for c in build(3)]  # type: ignore[operator]

    def act(w: Worker) -> str:
        w.draw()
        w.draw(0 if w.rank == 1 else 1)
        with pytest.raises(OptimizerStepsDiffer) as raised:
            w.draw()
        assert w.model.is_unfinished
        return str(raised.value)

    first, second, third = run_ranks(members, act)
    assert first == second == third
    assert "in step 2 rank 0 took 1 optimizer step and rank 1 took 0 optimizer steps" in first


def test_equal_counts_of_any_size_are_right() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for steps in (0, 1, 2, 0, 5):
            w.draw(steps)

    run_ranks(members, act)
    assert all(len(w.engine.pairs) == 5 for w in members)


def test_only_the_last_micro_batch_counts() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for _ in range(3):
            for number in range(1 + w.rank):
                w.engine.current = MicroBatch(0.5 / (1 + w.rank), number == w.rank)
                w.model(torch.ones(3, 4)).sum().backward()
                w.optimizer.step()
            w.end_step()

    run_ranks(members, act)
    assert all(len(w.engine.pairs) == 3 for w in members)


def test_a_rank_that_copied_the_last_step_is_not_counted() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        w.draw()
        if w.rank == 1:
            # On this rank alone: it copies what the other committed
            w.engine.failed = CollectiveFailed("lost")
            w.draw()
            w.engine.failed = None
            w.engine.step += 1
            assert optimizer_steps_of(w.engine).before(w.engine.step) is None
        else:
            optimizer_steps_of(w.engine).stepped()
            w.end_step()
        w.draw()
        w.draw()

    run_ranks(members, act)


def test_steps_of_a_failed_attempt_do_not_count() -> None:
    steps = optimizer_steps_of(FakeEngine())
    steps.stepped()
    steps.step_rolled_back()
    steps.stepped()
    steps.step_committed(4)
    steps.step_committed(4)  # of a second model
    assert steps.before(5) == 1
    assert steps.before(4) is None and steps.before(6) is None
    steps.leave_uncompared()
    assert steps.before(5) is None
