"""Defines the interface of the collectives of one generation, which is the same for every transport.

Every implementation passes the suite in tests/communicators. Operations are asynchronous; the abort flag releases any
waiter, even when a peer never answers.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from bagua_core.errors import InfrastructureLost

if TYPE_CHECKING:
    from bagua_core.communication.flight_record import FlightRecord


class ReduceOp(Enum):
    """The ways in which a reduction combines elements. AVG divides their sum by the number of ranks; B* are bitwise."""

    __hash__ = object.__hash__  # of the one member, in C: each collective looks its operation up

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BOR = "bor"
    BAND = "band"
    BXOR = "bxor"


STATE_TAG = 7001
"""Of messages that carry copies of the state (heal.py). They are no traffic of steps, and are counted apart from it."""


class Lane(Enum):
    """A communicator beside a generation's main one.

    NODE: the workers of this rank's node.
    LEADERS: the first worker of each node; only these workers have it.
    BACKGROUND: all workers, for operations that run beside the steps.
    STATISTICS: all workers, for what layers exchange within forward and backward.
    SHARD: in a job with replicas, the workers that hold the same shard, one of each replica, by replica rank. The other
    lanes are then among these workers alone, and SHARD has lanes of its own.
    """

    NODE = "node"
    LEADERS = "leaders"
    BACKGROUND = "background"
    STATISTICS = "statistics"
    SHARD = "shard"


class CollectiveFailed(InfrastructureLost):
    """A failure of the transport. hosts: addresses of the peers that the transport named, if any."""

    def __init__(self, detail: str, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hosts = hosts


class CollectiveAborted(CollectiveFailed):
    """An operation was given up on purpose: the abort flag was set. The buffer may still be written to later."""


class AbortFlag:
    """A flag that is set once and ends every wait of a communicator. `add_waiter` lets a wait sleep on a condition of
    its own instead of polling. A flag below another is set with it, and can be set without it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._waiters: list[Callable[[], None]] = []
        self._watches: list[weakref.WeakMethod[Callable[[], None]]] = []

    def set(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            waiters, self._waiters = self._waiters, []
        for wake in waiters:
            wake()

    @property
    def reason(self) -> str | None:
        return self._reason

    def is_set(self) -> bool:
        return self._reason is not None

    def below(self) -> AbortFlag:
        """Returns a new flag that is set with this one, for a part of what this one ends."""
        flag = AbortFlag()
        self.add_waiter(lambda: flag.set(self._reason or "aborted"))
        return flag

    def watch(self, check: Callable[[], None]) -> None:
        """Registers a check that the flag's own `check` calls too. The flag does not keep the object of the bound
        method.

        check: a bound method that raises CollectiveFailed once it knows of a failure in the generation.
        """
        with self._lock:
            self._watches = [w for w in self._watches if w() is not None]
            self._watches.append(weakref.WeakMethod(check))

    def check(self) -> None:
        """Raises CollectiveAborted if the flag is set, or the error that a watch raises."""
        if self._reason is not None:
            raise CollectiveAborted(self._reason)
        for watch in self._watches:
            check = watch()
            if check is not None:
                check()

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Calls `wake` once when the flag is set; at once if it is set already."""
        with self._lock:
            if self._reason is None:
                self._waiters.append(wake)
                return
        wake()

    def remove_waiter(self, wake: Callable[[], None]) -> None:
        with self._lock:
            if wake in self._waiters:
                self._waiters.remove(wake)


class Pending(ABC):
    """An operation under way on buffers that belong to it until it is done. The results are available once `wait` has
    returned; `is_done` says only that `wait` would not block."""

    @abstractmethod
    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        """Returns when the operation is done. Raises CollectiveFailed or CollectiveAborted.

        stalled(waited_s): called from the waiting thread each time another stall_after_s has passed.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """Tells whether `wait` would return without blocking, or raise."""

    def is_known_done(self) -> bool:
        """Tells observers whether the operation is done: as `is_done`, but from any thread and without moving the
        operation on."""
        return self.is_done()

    def follow(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        """Waits as `wait` does, but the host does not wait for a device. Work that is given to the calling thread's
        current stream from now on comes after the operation. A failure that shows later is raised where the host waits
        for this later work."""
        self.wait(stalled, stall_after_s)

    def check(self) -> None:
        """Raises CollectiveFailed if the operation is known to have failed or is given up."""
        return None


class Communicator(ABC):
    """The collectives among the members of one generation or one lane. global_rank and world_size are those of the
    generation, or places among the members of the lane. All tensors are contiguous."""

    generation: int
    global_rank: int
    world_size: int
    abort_flag: AbortFlag
    device: torch.device = torch.device("cpu")
    """Where the tensors are that it carries."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """The ranks of each node, both in ascending order; empty where it does not matter."""
    job_has_one_node: bool = False
    """Whether all workers of the generation are on one node, and not only those of this lane."""
    lanes: Mapping[Lane, Communicator] = MappingProxyType({})
    """Those that the job's algorithms asked for. Each has an abort flag below this communicator's: aborting a lane ends
    that lane alone."""
    adopted: Mapping[str, Communicator] = MappingProxyType({})
    """Others that end with this one, by name."""
    flight: FlightRecord | None = None
    """Its newest operations, where its transport records them."""

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        """Reduces `tensor` over all ranks, in place; all ranks get the same bits.

        Whole numbers wrap around and their mean is rounded towards zero; of booleans SUM is or, PRODUCT is and.
        Raises TypeError if op is not defined for the type (see reducible.py).
        """

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        """Reduces `tensor` over all ranks, in place on rank `destination`. On the other ranks `tensor` is scratch
        space: its contents are lost."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Overwrites `tensor` on all ranks with that of rank `source`."""

    @abstractmethod
    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Collects the tensors of all ranks on every rank. output: [world_size, *tensor.shape]."""

    @abstractmethod
    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        """Collects the tensors of all ranks on rank `destination`. output: [world_size, *tensor.shape] on that rank;
        ignored on the others."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        """Gives each rank its part of the tensor of rank `source`.

        tensor: [world_size, *output.shape] on rank `source`; ignored on the others.
        output: part `global_rank` of it.
        """

    @abstractmethod
    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """Sends one part of `tensor` to each rank and receives one from each.

        tensor: [world_size, ...]; part r goes to rank r.
        output: the same shape; part r is what rank r sent here.
        They share no memory. A rank sends and receives each part once, its own not at all.
        """

    @abstractmethod
    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        """Sends rows of `tensor` to each rank and receives rows from each: an alltoall of unequal parts.

        Rows of `tensor` (along its first dimension) go to the ranks in order. input_splits: the number of rows for each
        rank; output_splits: the number of rows that arrive from each. All ranks' rows have one shape and dtype, and
        what r expects from s is what s has for r.
        """

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        """Reduces `tensor` over all ranks and gives each rank its part of the result.

        tensor: [world_size, *output.shape]; output: part `global_rank` of the reduction over all ranks.
        Half precision is added in float32. They share no memory.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        """Sends `tensor` to rank `destination`, which calls `receive` with the same tag and as many elements."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        """Receives into `tensor` what rank `source` sends with this tag. Messages with one tag keep their order."""

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, Sequence[torch.Tensor]], tag: int
    ) -> list[Pending]:
        """Sends `outgoing` to each rank in `incoming`, and receives as many tensors of the same sizes from each.

        No rank waits for another to go first. The tensors get tags from `tag` on; swaps with one tag between two ranks
        keep their order. All pendings must be waited for.
        """
        begun: list[Pending] = []
        for peer, theirs in incoming.items():
            begun += [self.receive(tensor, peer, tag + i) for i, tensor in enumerate(theirs)]
        for peer in incoming:
            begun += [self.send(tensor, peer, tag + i) for i, tensor in enumerate(outgoing)]
        return begun

    def barrier(self) -> Pending:
        """Starts a barrier, which is done when every rank has called this."""
        return self.allreduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), ReduceOp.MAX)

    def drain(self) -> list[Pending]:
        """Returns operations that are done once a device has finished all work of this communicator, of its lanes and
        of those that it adopted. The list is empty if no device runs anything. Call it from the thread that starts
        collectives."""
        return [p for other in (*self.lanes.values(), *self.adopted.values()) for p in other.drain()]

    def adopt(self, name: str, other: Communicator) -> None:
        """Makes `other` be closed and aborted with this communicator. Call it from the thread that starts
        collectives."""
        self.adopted = MappingProxyType({**self.adopted, name: other})
        if self.abort_flag.is_set():  # after the line above: an abort meanwhile saw it, or is seen here
            other.abort(self.abort_flag.reason or "aborted")

    def close(self) -> None:
        """Releases connections and threads. Call it only when every member is known to be done with the
        communicator."""
        for other in (*self.lanes.values(), *self.adopted.values()):
            other.close()

    def abort(self, reason: str) -> None:
        """Releases every wait; afterwards neither the communicator nor its lanes can be used."""
        self.abort_flag.set(reason)  # first: a lane that alone is of no use was given up by its user
        for lane in self.lanes.values():
            lane.abort(reason)
        for other in self.adopted.values():
            other.abort(reason)
