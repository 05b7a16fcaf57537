"""Workers in threads whose generations a test changes at will: what a script's collectives know of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

from bagua_core.communication.communicator import CollectiveFailed, Pending
from bagua_core.communication.step_interface import StepPlan
from bagua_core.elastic.replica.own_replica import Outcome
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.waiting.operation_trail import OperationTrail
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import DEADLINE_S, run_ranks

T = TypeVar("T")


class Worker:
    """One rank's side: a member, the engine's answers, and the collectives over both.

    fails_after: waits that succeed for the others and fail here, counted from 1 over all this worker's waits.
    """

    def __init__(self, job: Job, worker_id: str) -> None:
        self.job = job
        self.worker_id = worker_id
        self.state = CommittedState()
        # a member
        self.communicator: InProcessCommunicator | None = None
        self.generation: Any = None
        self.broken = False
        self.is_closed = False
        self.replica = None
        self.jointly = nullcontext
        self.rendezvous = self
        self.trail = OperationTrail()
        # an engine
        self.in_step = False
        self.step_failed = False
        self.rounds = None
        self.virtual_shards = 0
        self.healing: frozenset[int] = frozenset()
        self.newcomers: frozenset[int] = frozenset()
        self.failed: list[Exception] = []
        self.operations: list[int] = []
        self.breaks: list[Exception] = []
        self.fails_after: set[int] = set()
        self.waits = 0
        me: Any = self
        self.before_loop = BeforeLoop(me)
        self.before_loop.boundary()
        self.collectives = OutsideCollectives(me, self.state, me, self.before_loop)

    @property
    def session(self) -> Any:
        return SimpleNamespace(news=SimpleNamespace(nonce="nonce"))

    def publish(self, values: dict[str, bytes]) -> None:
        """As a rendezvous: no worker joins later here."""

    @property
    def plan(self) -> StepPlan:
        assert self.communicator is not None
        return StepPlan(1, 5, self.communicator.global_rank, self.communicator.world_size, self.healing)

    def wait(self, pending: Pending) -> None:
        self.wait_unlearned(pending)

    def wait_unlearned(self, pending: Pending) -> None:
        pending.wait()
        self.waits += 1
        if self.waits in self.fails_after:
            raise CollectiveFailed("the others got through, this one did not")

    def reduction_failed(self, error: Exception) -> None:
        self.step_failed = True
        self.failed.append(error)

    def operation_done(self, index: int) -> None:
        self.operations.append(index)

    def agree(self, own: Outcome) -> Outcome:
        """It has no replica."""
        return own

    def break_generation(self, error: Exception) -> None:
        self.broken = True
        self.breaks.append(error)
        assert self.communicator is not None
        self.communicator.abort(str(error))

    def follow(self, outside: bool = False, given_up: Callable[[], bool] = lambda: False) -> None:
        self.job.enter(self)

    def drain(self) -> None:
        """As a member: no device runs anything here."""

    def side_communicator(self, members: tuple[int, ...], name: str = "outside") -> InProcessCommunicator:
        return self.job.connect(self, members, "side")

    def start(self, generation: Any, members: tuple[int, ...], suffix: str) -> Any:
        return SimpleNamespace(
            communicator=self.job.connect(self, members, suffix),
            done=True,
            error=None,
            abandon=lambda _: None,
        )

    def wait_for_transfer(self, done: Callable[[], bool]) -> None:
        assert done()


class Job:
    """The workers w0, w1, ... in one generation after the other."""

    def __init__(self, world_size: int) -> None:
        self._changed = threading.Condition()
        self._number = 1
        self._given_up = False
        self._waiting: list[Worker] = []
        self._connected: dict[tuple[object, ...], list[InProcessCommunicator]] = {}
        self.workers = [Worker(self, f"w{r}") for r in range(world_size)]
        self.living = list(self.workers)
        self._install(self.living)

    def _install(self, workers: Sequence[Worker]) -> None:
        record = SimpleNamespace(
            number=self._number,
            is_gathering=False,
            members=[SimpleNamespace(worker_id=w.worker_id) for w in workers],
        )
        for worker, made in zip(workers, build_in_process(len(workers), self._number), strict=True):
            worker.communicator, worker.generation, worker.broken = made, record, False

    def lose(self, worker_id: str) -> None:
        """It dies: every operation of the generation, under way or later, fails on the others."""
        with self._changed:
            (lost,) = (w for w in self.living if w.worker_id == worker_id)
            self.living.remove(lost)
            assert lost.communicator is not None
            lost.communicator.lose("10.0.0.9")
            self._go_on_if_complete()

    def give_up(self) -> None:
        """A worker's test failed: no other waits for it."""
        with self._changed:
            self._given_up = True
            for worker in self.workers:
                if worker.communicator is not None:
                    worker.communicator.lose("the test")
            self._changed.notify_all()

    def enter(self, worker: Worker) -> None:
        """All live workers enter the next generation together; one that is behind gets the log of the furthest."""
        with self._changed:
            came_for = self._number
            self._waiting.append(worker)
            self._go_on_if_complete()
            assert self._changed.wait_for(lambda: self._number > came_for or self._given_up, DEADLINE_S)
            assert not self._given_up

    def _go_on_if_complete(self) -> None:
        if len(self._waiting) == len(self.living):
            self._number += 1
            furthest = max(self.living, key=lambda w: len(w.state.operations.results()))
            for each in self.living:
                each.state.operations.replace(furthest.state.operations.results(), same_step=True)
            self._install(self.reordered(self.living))
            self._waiting = []
        self._changed.notify_all()

    def reordered(self, workers: Sequence[Worker]) -> list[Worker]:
        return list(workers)

    def connect(self, worker: Worker, members: tuple[int, ...], name: str) -> InProcessCommunicator:
        assert worker.communicator is not None
        with self._changed:
            key = (worker.generation.number, members, name)
            if key not in self._connected:
                self._connected[key] = build_in_process(len(members), self._number)
            return self._connected[key][members.index(worker.communicator.global_rank)]

    def connections(self, name: str) -> int:
        """How many groups were connected whose name begins so."""
        return sum(1 for key in self._connected if str(key[2]).startswith(name))


def run(job: Job, act: Callable[[Worker], T]) -> list[T]:
    """act in a thread each, for those that live now."""
    return run_ranks(list(job.living), act)
