"""A job in one process: fake engines that follow a script of joins, losses, roll-backs and heals.

Every worker is one loader with its own engine. `Job.step` lets all of them draw one step, records what
they used, and says what becomes of it; the engines act on that at the next boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from bagua_core.communication.step_interface import DataSource, MicroBatch, Stateful, StepPlan
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.state import state_codec

HISTORIES = st.lists(
    st.tuples(
        st.sets(st.integers(0, 3), max_size=2),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.none() | st.sets(st.integers(0, 4)),
    ),
    max_size=30,
)
"""The arguments of Job.play_step, step by step."""


class FakeEngine:
    round_steps: int | None = None
    virtual_shards = 0
    shard = (0, 1)  # place in the replica, and its workers

    @property
    def replica_size(self) -> int:
        return self.shard[1]

    def __init__(self) -> None:
        self.source: DataSource | None = None
        self.plan = StepPlan(1, 0, 0, 1)
        self.outcome = "commit"  # of the step under way: "commit" or "roll back"
        self.heal_to: dict[str, int] | None = None
        self.begun: list[MicroBatch] = []
        self.boundaries = 0
        self.finished = False
        self.auto_step = True
        self._registered: dict[str, Stateful] = {}
        self._snapshot: dict[str, Any] = {}

    def shard_place(self) -> tuple[int, int]:
        return self.shard

    def attach_source(self, source: DataSource) -> None:
        self.source = source

    def register_state(self, name: str, stateful: Stateful) -> None:
        self._registered[name] = stateful

    def captured(self) -> dict[str, Any]:
        """What is registered, as it travels."""
        manifest, tensors = state_codec.encode({n: s.state_dict() for n, s in self._registered.items()})
        captured: dict[str, Any] = state_codec.decode(manifest, tensors)
        return captured

    def restore(self, captured: dict[str, Any]) -> None:
        for name, state in captured.items():
            self._registered[name].load_state_dict(state)

    def epoch_begins(self, epoch: int) -> None:
        """As an engine whose script calls no collectives."""

    def epoch_ends(self) -> None:
        """As an engine whose script calls no collectives."""

    def boundary(self, goes_on: bool = False, confirmed: bool = False) -> StepPlan:
        assert self.source is not None
        self.boundaries += 1
        if self.begun:
            assert self.begun[-1].last or self.outcome == "roll back"
            if self.outcome == "commit":
                self.source.seek(self.source.after(self.source.position()))
            else:
                self.restore(self._snapshot)
            self.begun = []
        if self.heal_to is not None:
            self.source.seek(self.heal_to)
            self.heal_to = None
        return self.plan

    def begin_micro_batch(self, micro_batch: MicroBatch) -> None:
        if not self.begun:
            self._snapshot = self.captured()
        self.begun.append(micro_batch)

    def finish(self) -> bool:
        self.finished = True
        return True


@dataclass
class Worker:
    """What a user's loop does, one step at a time."""

    loader: ElasticDataLoader
    engine: FakeEngine
    epochs: int
    position: dict[str, int] = field(default_factory=lambda: {"epoch": 0, "batch": 0})
    batches: Iterator[tuple[int, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.batches = self._loop()

    def _loop(self) -> Iterator[tuple[int, Any]]:
        for epoch in self.loader.epochs(self.epochs):
            for data in self.loader:
                yield epoch, data

    def draw_step(self) -> list[tuple[int, Any, MicroBatch]] | None:
        """The micro-batches of one step; None at the end of the job."""
        drawn = []
        while True:
            item = next(self.batches, None)
            if item is None:
                assert not drawn
                return None
            micro_batch = self.engine.begun[-1]
            drawn.append((*item, micro_batch))
            if micro_batch.last:
                return drawn


class Job:
    def __init__(self, make_loader: Any, epochs: int, workers: int) -> None:
        self._make_loader = make_loader
        self.epochs = epochs
        self.generation = 0
        self.step = 0
        self.committed: list[tuple[int, list[int]]] = []  # epoch and samples of each committed step
        self.workers: list[Worker] = []
        self.position = {"epoch": 0, "batch": 0}
        for _ in range(workers):
            self._add()
        self._form(healing=())

    def _add(self) -> Worker:
        engine = FakeEngine()
        worker = Worker(self._make_loader(engine), engine, self.epochs)
        self.workers.append(worker)
        return worker

    def _form(self, healing: tuple[Worker, ...]) -> None:
        self.generation += 1
        for worker in healing:
            worker.engine.heal_to = dict(self.position)
        self._plan(healing)

    def _plan(self, healing: tuple[Worker, ...]) -> None:
        healing_ranks = frozenset(r for r, w in enumerate(self.workers) if w in healing)
        for global_rank, worker in enumerate(self.workers):
            worker.engine.plan = StepPlan(
                self.generation, self.step, global_rank, len(self.workers), healing_ranks
            )

    def play(self, history: list[Any]) -> None:
        """A history of HISTORIES, and then undisturbed steps to the job's end."""
        running = True
        for lost, joining, committed_by in history:
            running = running and self.play_step(lost, joining if len(self.workers) < 6 else 0, committed_by)
        while running:
            running = self.play_step(set(), 0, None)
        assert all(worker.engine.finished for worker in self.workers)

    def play_step(self, lost: set[int], joining: int, committed_by: set[int] | None) -> bool:
        """One step of all, and what follows it. committed_by: ranks that saw the reduction complete, None
        for all. Returns False at the end of the job."""
        draws = [worker.draw_step() for worker in self.workers]
        if any(draw is None for draw in draws):
            assert all(draw is None for draw in draws)
            return False
        position, samples = dict(self.position), self._check(draws)
        lost = {r for r in lost if r < len(self.workers)}
        if len(lost) == len(self.workers):
            lost = set()
        alive = [r for r in range(len(self.workers)) if r not in lost]
        committing = set(alive) if committed_by is None else {r for r in alive if r in committed_by}
        plan = self.workers[0].engine.plan
        holder = next(w for r, w in enumerate(self.workers) if r not in plan.healing)
        for healing in plan.healing:  # in the middle of the step
            self.workers[healing].engine.restore(holder.engine.captured())
        # a healing worker gets the state at the step's end, so it commits only what others committed
        if not committing - plan.healing and committing:
            committing = set()
        if not committing and plan.healing and not set(alive) - plan.healing:
            committing = set(alive) - plan.healing
            lost, alive = set(), list(range(len(self.workers)))
        if committing:
            self.committed.append((position["epoch"], samples))
            source = self.workers[0].loader
            self.position = source.after(position)
            self.step += 1
        behind = []
        for r in alive:
            self.workers[r].engine.outcome = "commit" if r in committing else "roll back"
            if (committing and r not in committing) or (not committing and r in plan.healing):
                behind.append(self.workers[r])
        changed = bool(lost or joining or len(committing) != len(alive))
        self.workers = [self.workers[r] for r in alive]
        newcomers = [self._add() for _ in range(joining)]
        if changed:
            self._form((*behind, *newcomers))
        else:
            self._plan(())
        return True

    def _check(self, draws: list[Any]) -> list[int]:
        plan = self.workers[0].engine.plan
        counts = {len(draw) for draw in draws}
        assert len(counts) == 1, "every rank runs the same number of micro-batches"
        assert abs(sum(m.weight for draw in draws for *_, m in draw) - 1.0) < 1e-9
        used: list[int] = []
        shares = []
        for global_rank, (worker, draw) in enumerate(zip(self.workers, draws, strict=True)):
            own = []
            for place, (epoch, data, micro_batch) in enumerate(draw):
                assert micro_batch.last == (place == len(draw) - 1)
                assert len(data) > 0
                assert epoch <= self.position["epoch"]
                if micro_batch.weight:
                    limit = worker.loader.max_local_batch_size
                    assert limit is None or len(data) <= limit
                    own += [int(v) for v in data]
            assert worker.loader.position() == self.position
            assert own == worker.loader.samples_of(self.position, plan, global_rank)
            if global_rank in plan.healing:
                assert not own
            else:
                shares.append(len(own))
            used += own
        self._check_sizes(shares)
        assert len(used) == len(set(used))
        for global_rank, worker in enumerate(self.workers):
            # Of a stream's end these know once they have copied the state
            if global_rank not in plan.healing:
                assert worker.loader.sample_count(self.position) == len(used), "of a short last batch too"
        return used

    def _check_sizes(self, sizes: list[int]) -> None:
        is_full = sum(sizes) == self.workers[0].loader.global_batch_size
        sizes = [size for size in sizes if size or is_full]  # of a short batch some may have no share
        assert max(sizes) - min(sizes) <= 1
