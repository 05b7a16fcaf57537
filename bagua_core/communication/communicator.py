"""The collectives of one generation: one interface, whatever carries the bytes.

Every implementation passes the suite in tests/contracts. Operations are asynchronous; the
abort flag releases any waiter, even when a peer never answers.
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
    """How a reduction combines elements; AVG divides their sum by the number of ranks, B* are bitwise."""

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
    """A communicator beside a generation's main one. NODE: the workers of this rank's node. LEADERS: the first worker
    of each node; only they have it. BACKGROUND: all workers, for what runs beside the steps. STATISTICS: all workers,
    for what layers exchange within forward and backward. SHARD: in a job with replicas, the workers that hold the same
    shard, one of each replica, by replica rank; the others are then among these workers alone, and its own lanes."""

    NODE = "node"
    LEADERS = "leaders"
    BACKGROUND = "background"
    STATISTICS = "statistics"
    SHARD = "shard"


class CollectiveFailed(InfrastructureLost):
    """The transport failed. hosts: addresses of the peers it named, if any."""

    def __init__(self, detail: str, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.hosts = hosts


class CollectiveAborted(CollectiveFailed):
    """Given up on purpose: the abort flag was set. The buffer may still be written to later."""


class AbortFlag:
    """Set once, seen by every wait of a communicator. `add_waiter` lets a wait sleep on a condition
    of its own instead of polling. A flag below another is set with it, and can be set without it."""

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
        """A new flag, for a part of what this one ends."""
        flag = AbortFlag()
        self.add_waiter(lambda: flag.set(self._reason or "aborted"))
        return flag

    def watch(self, check: Callable[[], None]) -> None:
        """check: a bound method that raises CollectiveFailed once it knows of a failure in the generation. The flag
        does not keep its object."""
        with self._lock:
            self._watches = [w for w in self._watches if w() is not None]
            self._watches.append(weakref.WeakMethod(check))

    def check(self) -> None:
        """Raise CollectiveAborted if the flag is set, or what a watch raises."""
        if self._reason is not None:
            raise CollectiveAborted(self._reason)
        for watch in self._watches:
            check = watch()
            if check is not None:
                check()

    def add_waiter(self, wake: Callable[[], None]) -> None:
        """Call `wake` once when the flag is set; at once if it is."""
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
    """An operation under way on buffers that belong to it until it is done. Results are there once `wait` has returned;
    `is_done` says only that it would not block."""

    @abstractmethod
    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        """Return when done. Raises CollectiveFailed or CollectiveAborted.

        stalled(waited_s): called from the waiting thread each time another stall_after_s has passed.
        """

    @abstractmethod
    def is_done(self) -> bool: ...

    def is_known_done(self) -> bool:
        """As `is_done`, for observers: from any thread, and without moving the operation on."""
        return self.is_done()

    def follow(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        """As `wait`, but the host does not wait for a device: what the calling thread's current stream is given from
        now on comes after the operation. A failure that shows later is raised where the host waits for what comes
        after."""
        self.wait(stalled, stall_after_s)

    def check(self) -> None:
        """Raise CollectiveFailed if the operation is known to have failed or is given up."""
        return None


class Communicator(ABC):
    """global_rank and world_size are of its generation, or places among the members of a lane. All tensors are
    contiguous."""

    generation: int
    global_rank: int
    world_size: int
    abort_flag: AbortFlag
    device: torch.device = torch.device("cpu")
    """Where the tensors are that it carries."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """The ranks of each node, both in ascending order; empty where it does not matter."""
    lanes: Mapping[Lane, Communicator] = MappingProxyType({})
    """Those that the job's algorithms asked for. Each has an abort flag below this communicator's: aborting a lane ends
    that lane alone."""
    adopted: Mapping[str, Communicator] = MappingProxyType({})
    """Others that end with this one, by name."""
    flight: FlightRecord | None = None
    """Its newest operations, where its transport records them."""

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        """In place; the same bits on all ranks.

        Whole numbers wrap around and their mean is rounded towards zero; of booleans SUM is or, PRODUCT is and.
        Raises TypeError where op means nothing for the type (see reducible.py).
        """

    @abstractmethod
    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        """In place on rank `destination`; on the others `tensor` is scratch space, its contents are lost."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """In place."""

    @abstractmethod
    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """output: [world_size, *tensor.shape]."""

    @abstractmethod
    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        """output: [world_size, *tensor.shape] on rank `destination`; of the others it is ignored."""

    @abstractmethod
    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        """tensor: [world_size, *output.shape] on rank `source`; of the others it is ignored. output: part
        `global_rank` of it."""

    @abstractmethod
    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        """tensor: [world_size, ...]; part r goes to rank r. output: the same shape; part r is what rank r sent here.

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
        """alltoall of unequal parts: rows of `tensor` (along its first dimension) go to the ranks in order, as many as
        input_splits says; output_splits says how many arrive from each. All ranks' rows have one shape and dtype,
        and what r expects from s is what s has for r."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        """tensor: [world_size, *output.shape]; output: part `global_rank` of the reduction over all ranks.

        Half precision is added in float32. They share no memory.
        """

    @abstractmethod
    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending: ...

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending: ...

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, Sequence[torch.Tensor]], tag: int
    ) -> list[Pending]:
        """Send `outgoing` to each rank in `incoming`, and receive what it sends: as many tensors, of the same sizes.

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
        """Done when every rank has called it."""
        return self.allreduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), ReduceOp.MAX)

    def drain(self) -> list[Pending]:
        """Operations that are done once a device has nothing left of what this communicator, its lanes and those that
        it adopted were given. None where no device runs anything. From the thread that starts collectives."""
        return [p for other in (*self.lanes.values(), *self.adopted.values()) for p in other.drain()]

    def adopt(self, name: str, other: Communicator) -> None:
        """From now on `other` is closed and aborted with this one. From the thread that starts collectives."""
        self.adopted = MappingProxyType({**self.adopted, name: other})
        if self.abort_flag.is_set():  # after the line above: an abort meanwhile saw it, or is seen here
            other.abort(self.abort_flag.reason or "aborted")

    def close(self) -> None:
        """Give back connections and threads. Only when every member is known to be done with it."""
        for other in (*self.lanes.values(), *self.adopted.values()):
            other.close()

    def abort(self, reason: str) -> None:
        """Release every wait; afterwards neither the communicator nor its lanes are of any use."""
        self.abort_flag.set(reason)  # first: a lane that alone is of no use was given up by its user
        for lane in self.lanes.values():
            lane.abort(reason)
        for other in self.adopted.values():
            other.abort(reason)
