"""This worker's replica once it is assembled: its place in it, and the outcomes on which its shards agree.

Inside a replica torch's collectives can't be given up: a shard that waits in one waits for its mates, and for nothing
else. So no shard may act on an outcome that its mates may not know. `Outcome`s are agreed on by a Gloo group of the
replica's own, in the order in which the script comes to them; generations by words (joint_following.py), for shards
follow them each in its own time. Owns that group and the connections; decides nothing.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum

import torch

from bagua_contract.replica import Replica
from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.elastic.replica.joint_following import JointFollowing, Word
from bagua_core.elastic.replica.shard_watch import ShardWatch
from bagua_core.errors import InfrastructureLost


class ReplicaLost(InfrastructureLost, RuntimeError):
    """Another shard of this worker's replica is gone, so the replica is over."""


class Outcome(IntEnum):
    """Says how something ended on one shard. The greatest of all shards' is the replica's."""

    DONE = 0
    MOVES = 1  # done, and this shard has to follow a change of membership
    FAILED = 2


class OwnReplica:
    """The replica of this worker. record: its workers in shard order. control: a group of these alone. links: of
    shard_watch.connect."""

    def __init__(
        self,
        record: Replica,
        shard_rank: int,
        control: Communicator,
        links: Mapping[int, socket.socket] | None = None,
    ) -> None:
        self.record = record
        self.size = record.size
        self.shard_rank = shard_rank
        self._control = control
        self._links = dict(links or {})
        self._watch: ShardWatch | None = None
        self.following: JointFollowing | None = None
        self.is_over = False
        """A shard was lost."""

    @property
    def place(self) -> tuple[int, int]:
        """The shard rank and the size."""
        return self.shard_rank, self.size

    def agree(self, own: Outcome, wait: Callable[[Pending], None]) -> Outcome:
        """Returns the greatest outcome of all shards, which come here in the same order. wait: raises CollectiveFailed
        when a shard is gone."""
        found = torch.tensor([int(own)], dtype=torch.int32, device="cpu")
        wait(self._control.allreduce(found, ReduceOp.MAX))
        return Outcome(int(found))

    def of_first(self, own: torch.Tensor, wait: Callable[[Pending], None]) -> torch.Tensor:
        """Returns the tensor of shard 0, where shards measure different values and all must have one."""
        found = own.clone()
        wait(self._control.broadcast(found, 0))
        return found

    def watch_mates(self, on_lost: Callable[[int], None], changed: threading.Condition) -> None:
        """Reports, from now on, each shard that ends, by its shard rank, from a thread of its own. changed: notified
        when a mate says something."""
        self.following = JointFollowing(self.shard_rank, self.size, self._say, changed)

        def lost(shard_rank: int) -> None:
            with changed:
                self.is_over = True
                changed.notify_all()
            on_lost(shard_rank)

        self._watch = ShardWatch(self._links, lost, self.following.heard, self.following.left)

    def _say(self, shard_rank: int, word: Word, number: int) -> None:
        if self._watch is not None:
            self._watch.say(shard_rank, word, number)

    def close(self, *, in_order: bool) -> None:
        """Ends the watch, since the process ends. in_order: the other shards need not report it."""
        if self._watch is not None:
            self._watch.close(in_order=in_order)
            self._watch = None
