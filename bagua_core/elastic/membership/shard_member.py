"""Coordinates a member of a job with replicas with the other shards of its replica.

A shard acts on nothing that its mates may not know: they agree on the outcome of each collective that a script can see,
and start no step before all of them have entered the same generation. The base of Member, which follows generations.
Runs in the script's thread.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NoReturn

import torch

from bagua_contract import membership_pb2
from bagua_contract.addresses import parted
from bagua_contract.environment import WorkerEnvironment
from bagua_contract.records import SuspicionKind
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane, Pending
from bagua_core.elastic.membership.member_waits import MemberWaits
from bagua_core.elastic.membership.session import AgentMessages
from bagua_core.elastic.replica import assembly
from bagua_core.elastic.replica.joint_following import JointFollowing
from bagua_core.elastic.replica.own_replica import Outcome, OwnReplica, ReplicaLost
from bagua_core.elastic.replica.torch_errors import first_line, is_of_torch_group
from bagua_core.errors import BaguaError

_LOOK_S = 0.02  # while a mate is on its way to another generation
ENDED_WITHIN_S = 30.0  # by the agent, once a mate is gone


class _Closed(BaguaError):
    """The job is over."""


class ShardMember(MemberWaits):
    def __init__(self) -> None:
        super().__init__()
        self.replica: OwnReplica | None = None
        """None in a job whose replicas are single workers, and before this worker has one."""

    @property
    def lane(self) -> Communicator | None:
        """The generation's communicator of the workers with this shard, by replica rank; of all workers if each is a
        replica."""
        main = self.communicator
        return main if main is None or not main.lanes else main.lanes.get(Lane.SHARD, main)

    def of_this_shard(self, replica_rank: int) -> int:
        """Returns the global rank of the worker with this shard in that replica."""
        shard_rank, size = (0, 1) if self.replica is None else self.replica.place
        return replica_rank * size + shard_rank

    def settle_device(self) -> None:
        """Waits for the kernels of the replica's own collectives: a communicator is not joined beside them. Called at a
        boundary, where all shards have launched theirs."""
        if self.replica is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def assemble(self, environment: WorkerEnvironment, address: str) -> None:
        """Meets the other shards of this worker's replica, if the job has replicas of several workers. address: of this
        worker's meeting store. Raises ReplicaLost; SystemExit or LeaveInterrupt when this worker is to end instead."""
        size = environment.replica_size
        if size <= 1 or self.replica is not None:
            return

        def ended() -> None:
            news = self.session.news
            if news.close or news.leave:
                self._end(news, 0, "before it had a replica", None)

        record = assembly.await_record(self.session, self.changed, address, size, ended)
        self.replica = assembly.connect(record, environment.worker_id, environment.bind_host)
        self.replica.watch_mates(self._mate_ended, self.changed)

    def close(self, *, in_order: bool) -> None:
        """Closes the replica and the session, since the process ends. in_order: by itself, without an error."""
        if self.replica is not None:
            self.replica.close(in_order=in_order)
        self.session.close()

    def _mate_ended(self, shard_rank: int) -> None:
        """Reports the end of a mate now, since this worker may compute for long before it meets the loss. Whatever
        follows for this worker comes from the agent. Runs in the thread of the watch."""
        news, generation = self.session.news, self.generation
        if self.replica is None or generation is None or news.close or news.leave:
            return
        mate = self.replica.record.members[shard_rank]
        host, _ = parted(mate.store_address)
        self.session.suspect(
            generation.number,
            SuspicionKind.BROKEN,
            hosts=(host,),
            detail=f"shard {shard_rank} of its replica, {mate.worker_id} on {mate.node_name}, is gone",
        )

    @abstractmethod
    def _end(
        self, news: AgentMessages, number: int, reason: str, last: membership_pb2.LastCheckpoint | None
    ) -> NoReturn:
        """Leaves the job."""

    def agree(self, own: Outcome) -> Outcome:
        """Returns the worst of the replica's shards' outcomes; without replicas, `own`."""
        if self.replica is None:
            return own
        try:
            return self.replica.agree(own, self._wait_for_mates)
        except _Closed:
            return Outcome.FAILED  # the job is over: what is still under way counts for nothing

    def of_first_shard(self, own: torch.Tensor) -> torch.Tensor:
        """Returns what shard 0 of the replica has; without replicas, `own`."""
        if self.replica is None:
            return own
        try:
            return self.replica.of_first(own, self._wait_for_mates)
        except _Closed:
            return own

    @contextmanager
    def jointly(self) -> Iterator[None]:
        """Makes what is done within this context succeed on all shards of the replica or on none. Raises
        CollectiveFailed."""
        if self.replica is None:
            yield
            return
        try:
            yield
        except CollectiveFailed:
            self.agree(Outcome.FAILED)
            raise
        if self.agree(Outcome.DONE) is Outcome.FAILED:
            raise CollectiveFailed("it failed on another shard of this replica")

    def _moves_to(self, number: int) -> None:
        """Tells the mates that this worker is about to enter generation `number`, for which it needs them."""
        if self.replica is not None and self.replica.following is not None:
            self.replica.following.moves(number)

    def _is_joint(self, number: int, moves: Callable[[], bool]) -> bool:
        """Waits until all shards have entered a generation, and returns whether it is `number` for all; then it is on
        all of them. moves: whether there is another one to enter: shard 0 goes by it, and the others by shard 0's
        word."""
        following = None if self.replica is None else self.replica.following
        if following is None:
            return True
        following.arrive(number)
        began_s = time.monotonic()
        while True:
            said = following.said  # before the question, so that no word is overlooked
            if (found := following.outcome(number)) is not None:
                return found
            if following.decides and moves():
                return False
            try:
                self._look(time.monotonic() - began_s)
                self._of_mates(partial(self._wait_for_word, following, said))
            except _Closed:
                return True

    def _wait_for_word(self, following: JointFollowing, said: int) -> None:
        """Waits for a word of another shard, a moment at most. Raises CollectiveFailed once a shard is lost."""
        replica = self.replica
        assert replica is not None
        with self.changed:
            self.changed.wait_for(lambda: following.said != said or replica.is_over, timeout=_LOOK_S)
        if replica.is_over:
            raise CollectiveFailed("its connection ended")

    def _wait_for_mates(self, pending: Pending) -> None:
        self.stalls.wait_begins(self._waits)
        with self.trail.aside():  # other replicas may be elsewhere meanwhile
            self._of_mates(lambda: pending.wait(self._look, self._waits.threshold_s))
        self.stalls.went_on()

    def _look(self, waited_s: float) -> None:
        self._check_agreed()
        if self.session.news.close:
            raise _Closed
        self.stalled(waited_s)

    def _of_mates(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except CollectiveFailed as error:
            if self.session.news.close:
                raise _Closed from error
            self._replica_lost(error)

    def script_failed(self, error: BaseException) -> None:
        """Handles the end of the script with `error`. If a collective of the replica failed because a mate is gone,
        this reports it to the agent, and waits until the agent ends this worker: then the mate's end is what is shown.
        Returns where the error is the script's own, or the agent has not ended this worker in time."""
        if self.replica is None or self.session.news.close or not is_of_torch_group(error):
            return
        detail = first_line(error)
        print(
            f"bagua: a collective of replica {self.replica.record.replica_id} failed on shard "
            f"{self.replica.shard_rank}, so another shard has ended or lost its host: {detail}",
            file=sys.stderr,
            flush=True,
        )
        self.break_generation(CollectiveFailed(f"a collective within the replica failed: {detail}"))
        self._await_end()

    @abstractmethod
    def break_generation(self, error: Exception) -> None:
        """Gives up the generation in force, and reports why."""

    def _await_end(self) -> None:
        """Waits until the agent ends this process, for a bounded time; not longer than the job lasts."""
        until_s = time.monotonic() + ENDED_WITHIN_S
        while not self.session.news.close and (left_s := until_s - time.monotonic()) > 0:
            with self.changed:
                self.changed.wait(timeout=min(1.0, left_s))

    def _replica_lost(self, error: CollectiveFailed) -> NoReturn:
        """Waits for the agent to end this worker, since a mate is gone. Raises ReplicaLost if the agent does not."""
        assert self.replica is not None
        self._await_end()
        raise ReplicaLost(
            f"shard {self.replica.shard_rank} of replica {self.replica.record.replica_id} lost another shard "
            f"({error.detail}), and the agent did not end it within {ENDED_WITHIN_S:g} s"
        ) from error
