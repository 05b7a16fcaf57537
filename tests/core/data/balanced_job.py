"""A job in one process whose loaders balance: fake_job.py's, with sums that all add to and state that is healed.

A copy of the state that a healing worker receives is the one that others had when the step began, as in a shadow step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua_core.communication.communicator import ReduceOp
from bagua_core.communication.step_interface import MicroBatch, StepPlan
from tests.core.data.fake_job import FakeEngine, Job, Worker

State = dict[str, dict[str, torch.Tensor]]


class BalancedEngine(FakeEngine):
    """true_cost: seconds of a sample, by its index."""

    def __init__(
        self, job: BalancedJob | None = None, true_cost: Callable[[int], float] = lambda _: 1.0
    ) -> None:
        super().__init__()
        self.job = job
        self.true_cost = true_cost
        self.states: dict[str, Any] = {}
        self.before: dict[
            tuple[int, int], State
        ] = {}  # by (generation, step): what this worker had as it began
        self.step_plan = self.plan
        self.step_failed = False
        self.weights: list[float] = []

    def register_state(self, name: str, stateful: Any) -> None:
        self.states[name] = stateful

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        assert op is ReduceOp.SUM and self.begun
        if self.job is None:
            return tensor.clone()
        # filled by the others, who draw after this one and before any of them commits
        total = self.job.totals.setdefault((self.plan.generation, self.plan.step), torch.zeros_like(tensor))
        if self.plan.active_index is not None:
            total += tensor
        return total

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        self.weights.append(micro_batch.weight)
        if not self.begun:
            self.step_plan = self.plan
            if self.plan.active_index is not None:
                self.before[self.plan.generation, self.plan.step] = {
                    name: {key: value.clone() for key, value in state.state_dict().items()}
                    for name, state in self.states.items()
                }
        super().begin_micro_batch(micro_batch)

    def boundary(self) -> StepPlan:
        if self.begun and self.outcome == "commit":
            plan = self.step_plan
            assert self.source is not None
            if plan.active_index is None:
                assert self.job is not None
                for name, state in self.job.holders_state(plan).items():
                    self.states[name].load_state_dict(state)
            used = self.source.samples_of(self.source.position(), plan, plan.global_rank)
            self.source.step_committed(plan, 0.01 + sum(map(self.true_cost, used)))
        return super().boundary()


class BalancedJob(Job):
    def __init__(
        self, make_loader: Any, epochs: int, workers: int, true_cost: Callable[[int], float]
    ) -> None:
        self.totals: dict[tuple[int, int], torch.Tensor] = {}
        self.everyone: list[Worker] = []
        self.true_cost = true_cost
        self.imbalances: list[float] = []
        self.earlier: list[tuple[dict[str, int], StepPlan, int, list[int]]] = []
        super().__init__(make_loader, epochs, workers)

    def _add(self) -> Worker:
        engine = BalancedEngine(self, self.true_cost)
        worker = Worker(self._make_loader(engine), engine, self.epochs)
        self.workers.append(worker)
        self.everyone.append(worker)
        return worker

    def holders_state(self, plan: StepPlan) -> State:
        for worker in self.everyone:
            engine = worker.engine
            assert isinstance(engine, BalancedEngine)
            if (plan.generation, plan.step) in engine.before:
                return engine.before[plan.generation, plan.step]
        raise AssertionError("nobody had the state")

    def _check(self, draws: list[Any]) -> list[int]:
        plan = self.workers[0].engine.plan
        assert len({len(draw) for draw in draws}) == 1, "every rank runs the same number of micro-batches"
        assert abs(sum(m.weight for draw in draws for *_, m in draw) - 1.0) < 1e-9
        holders = [w for r, w in enumerate(self.workers) if r not in plan.healing]
        for (
            position,
            before,
            global_rank,
            own,
        ) in self.earlier:  # the ledger's lines of it are still to be written
            for asked in holders:
                assert asked.loader.samples_of(position, before, global_rank) == own
        self.earlier.clear()
        states = [holder.engine.states for holder in holders]
        for name, state in states[0].items():
            for key, value in state.state_dict().items():
                assert all(torch.equal(value, other[name].state_dict()[key]) for other in states)
        used: list[int] = []
        costs = []
        for global_rank, (worker, draw) in enumerate(zip(self.workers, draws, strict=True)):
            own = []
            for place, (_, data, micro_batch) in enumerate(draw):
                assert micro_batch.last == (place == len(draw) - 1)
                assert len(data) > 0
                if micro_batch.weight:
                    limit = worker.loader.max_local_batch_size
                    assert limit is None or len(data) <= limit
                    own += [int(v) for v in data]
            assert worker.loader.position() == self.position
            for asked in holders:  # whoever writes the ledger for it says the same
                assert asked.loader.samples_of(self.position, plan, global_rank) == own
            self.earlier.append((dict(self.position), plan, global_rank, own))
            if global_rank in plan.healing:
                assert not own
            else:
                costs.append(sum(map(self.true_cost, own)))
            used += own
        assert len(used) == len(set(used))
        if sum(costs):
            self.imbalances.append(max(costs) * len(costs) / sum(costs))
        return used
