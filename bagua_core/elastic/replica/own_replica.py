"""This worker's replica once it is assembled: its place in it, and the outcomes on which its shards agree.

Inside a replica torch's collectives can't be given up: a shard that waits in one waits for its mates, and for nothing
else. So no shard may act on an outcome that its mates may not know. `Outcome`s and generations are agreed on by a Gloo
group of the replica's own, in the order in which the script comes to them. Owns that group; decides nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from enum import IntEnum

import torch

from bagua_contract.replica import Replica
from bagua_core.communication.communicator import Communicator, Pending, ReduceOp
from bagua_core.elastic.replica.mate_watch import MateWatch
from bagua_core.errors import InfrastructureLost


class ReplicaLost(InfrastructureLost, RuntimeError):
    """Another shard of this worker's replica is gone, so the replica is over."""


class Outcome(IntEnum):
    """How something ended on one shard. The greatest of all shards' is the replica's."""

    DONE = 0
    MOVES = 1  # done, and this shard has to follow a change of membership
    FAILED = 2


class OwnReplica:
    """record: its workers in shard order. control: a group of these alone. links: of mate_watch.connect."""

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
        self._round: tuple[torch.Tensor, Pending] | None = None
        self._links = dict(links or {})
        self._watch: MateWatch | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Shard rank and size."""
        return self.shard_rank, self.size

    def agree(self, own: Outcome, wait: Callable[[Pending], None]) -> Outcome:
        """All shards come here in the same order. wait: raises CollectiveFailed when a shard is gone."""
        found = torch.tensor([int(own)], dtype=torch.int32)
        wait(self._control.allreduce(found, ReduceOp.MAX))
        return Outcome(int(found))

    def of_first(self, own: torch.Tensor, wait: Callable[[Pending], None]) -> torch.Tensor:
        """The tensor of shard 0, where shards measure different values and all must have one."""
        found = own.clone()
        wait(self._control.broadcast(found, 0))
        return found

    def numbers(self, own: int, wait: Callable[[Pending], None]) -> list[int]:
        """Each shard's number. What `wait` raises leaves the exchange open: the next call goes on with it, with the
        number that was given first."""
        if self._round is None:
            rows = torch.zeros((self.size, 1), dtype=torch.int64)
            self._round = rows, self._control.allgather(rows, torch.tensor([own], dtype=torch.int64))
        rows, pending = self._round
        wait(pending)
        self._round = None
        return [int(each) for each in rows.flatten().tolist()]

    def watch_mates(self, on_lost: Callable[[int], None]) -> None:
        """From now on report each shard that ends, by its shard rank, from a thread of its own."""
        self._watch = MateWatch(self._links, on_lost)

    def close(self, *, in_order: bool) -> None:
        """The process ends. in_order: the other shards need not report it."""
        if self._watch is not None:
            self._watch.close(in_order=in_order)
            self._watch = None
