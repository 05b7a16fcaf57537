"""Workers in threads whose generations a test changes at will: what a script's collectives know of a job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

from bagua_core.communication.communicator import CollectiveFailed, Pending
from bagua_core.communication.step_interface import StepPlan
from bagua_core.elastic.membership.shard_member import ShardMember
from bagua_core.elastic.replica.own_replica import Outcome, OwnReplica
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.step.script_ranks import ScriptRanks
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
        self.is_closed = self.is_over = False
        self.place_left_out: tuple[int, int] | None = None
        self.replica: OwnReplica | None = None
        self.lane: InProcessCommunicator | None = None
        self.jointly: Callable[[], Any] = nullcontext
        self.rendezvous = self
        self.trail = OperationTrail()
        # an engine
        self.in_step = False
        self.step_failed = False
        self.has_fillers = False
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
        self.member = me
        self._before_loop = BeforeLoop(me)
        self._before_loop.boundary()
        self.collectives = OutsideCollectives(me, self.state, me, self._before_loop)

    @property
    def session(self) -> Any:
        return SimpleNamespace(news=SimpleNamespace(nonce="nonce-1"))

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

    def joiner_left_out(self) -> None:
        """As an engine whose script has not asked for the world size."""

    def have(self, replica: OwnReplica) -> None:
        self.replica = replica
        me: Any = self
        self.jointly = lambda: ShardMember.jointly(me)

    def agree(self, own: Outcome) -> Outcome:
        return own if self.replica is None else self.replica.agree(own, lambda pending: pending.wait())

    def replica_place(self) -> tuple[int, int]:
        """As ScriptRanks.replica_place."""
        return ScriptRanks.replica_place(self.member)

    def shard_place(self) -> tuple[int, int]:
        return (0, 1) if self.replica is None else self.replica.place

    def place_of_script(self) -> tuple[int, int]:
        return ScriptRanks.place_of_script(self.member)

    @property
    def global_rank(self) -> int:
        return 0 if self.lane is None else self.lane.global_rank

    @property
    def world_size(self) -> int:
        return 1 if self.lane is None else self.lane.world_size

    def break_generation(self, error: Exception) -> None:
        self.broken = True
        self.breaks.append(error)
        for each in (self.communicator, self.lane):
            if each is not None:
                each.abort(str(error))

    def follow(self, outside: bool = False, given_up: Callable[[], bool] = lambda: False) -> None:
        if self in self.job.living:
            self.job.enter(self)
        else:
            self.communicator = self.lane = self.generation = None
            self.broken = False
            size = len(self.job.living) // self.job.replica_size
            self.place_left_out = (size, size + 1)

    def drain(self) -> None:
        """As a member: no device runs anything here."""

    def side_communicator(self, members: tuple[int, ...], name: str = "outside") -> InProcessCommunicator:
        return self.job.connect(self, members, f"side/{name}")

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
    """The workers w0, w1, ... in one generation after the other. replica_size: so many, one after the other, are a
    replica."""

    def __init__(self, world_size: int, replica_size: int = 1) -> None:
        self.replica_size = self._size = replica_size
        self._changed = threading.Condition()
        self._number = 1
        self._given_up = False
        self._waiting: list[Worker] = []
        self._connected: dict[tuple[object, ...], list[InProcessCommunicator]] = {}
        self.workers = [Worker(self, f"w{r}") for r in range(world_size)]
        self._controls: list[InProcessCommunicator] = []
        for first in range(0, world_size if replica_size > 1 else 0, replica_size):
            controls = build_in_process(replica_size)
            self._controls += controls
            record: Any = SimpleNamespace(size=replica_size)
            for shard, control in enumerate(controls):
                self.workers[first + shard].have(OwnReplica(record, shard, control))
        self.living = list(self.workers)
        self._install(self.living)

    def _install(self, workers: Sequence[Worker]) -> None:
        record = SimpleNamespace(
            number=self._number,
            is_gathering=False,
            members=[
                SimpleNamespace(worker_id=w.worker_id, shard_rank=i % self._size)
                for i, w in enumerate(workers)
            ],
        )
        for worker, made in zip(workers, build_in_process(len(workers), self._number), strict=True):
            worker.communicator = worker.lane = made
            worker.generation, worker.broken = record, False
        for shard in range(self._size if self._size > 1 else 0):
            own = workers[shard :: self._size]
            for worker, made in zip(own, build_in_process(len(own), self._number), strict=True):
                worker.lane = made

    def lose(self, worker_id: str) -> None:
        """The job goes on without it and its replica: every operation of the generation, under way or later, fails on
        the others. A worker that lives all the same finds itself left out."""
        with self._changed:
            (at,) = (i for i, w in enumerate(self.living) if w.worker_id == worker_id)
            first = at - at % self._size
            for lost in self.living[first : first + self._size]:
                self.living.remove(lost)
                assert lost.communicator is not None and lost.lane is not None
                lost.communicator.lose("10.0.0.9")
                lost.lane.lose("10.0.0.9")
            self._go_on_if_complete()

    def give_up(self) -> None:
        """A worker's test failed: no other waits for it."""
        with self._changed:
            self._given_up = True
            for each in [*self._controls, *(c for w in self.workers for c in (w.communicator, w.lane))]:
                if each is not None:
                    each.lose("the test")
            self._changed.notify_all()

    def enter(self, worker: Worker) -> None:
        """All live workers enter the next generation together; one that is behind gets the log of the furthest with its
        shard."""
        with self._changed:
            came_for = self._number
            self._waiting.append(worker)
            self._go_on_if_complete()
            assert self._changed.wait_for(lambda: self._number > came_for or self._given_up, DEADLINE_S)
            assert not self._given_up

    def _go_on_if_complete(self) -> None:
        if len(self._waiting) == len(self.living):
            self._number += 1
            for shard in range(self._size):  # copies go from equal shard to equal shard
                own = self.living[shard :: self._size]
                furthest = max(own, key=lambda w: len(w.state.operations.results()))
                for each in own:
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
