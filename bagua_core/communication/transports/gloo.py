"""Carries the collectives of one generation over Gloo: CPU tensors, TCP between hosts.

Owns one torch ProcessGroupGloo, made straight from a store; torch's default group is not touched. Waits never block in
Gloo for long: its operations cannot be given up while a peer is silent. A group that failed or was aborted is kept, for
destroying it would wait for its operations (retired_groups.py).
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from bagua_core.communication import slices, traffic
from bagua_core.communication.arithmetic import divide, reduce_parts
from bagua_core.communication.communicator import (
    STATE_TAG,
    AbortFlag,
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
    ReduceOp,
)
from bagua_core.communication.flight_record import FlightRecord
from bagua_core.communication.pending import DonePending, FailedPending
from bagua_core.communication.reducible import Carrier, carrier_of, check_reducible
from bagua_core.communication.shapes import (
    check_allgather,
    check_alltoall,
    check_alltoall_v,
    check_gather,
    check_reduce_scatter,
    check_scatter,
)
from bagua_core.communication.transports import retired_groups
from bagua_core.communication.transports.gloo_connect import Connecting, WatchedStore
from bagua_core.communication.transports.gloo_errors import collective_failed
from bagua_core.communication.transports.gloo_pending import BriefWaits, GlooCollective, GlooThreaded
from bagua_core.communication.transports.gloo_reductions import OPERATIONS, OPTIONS
from bagua_core.communication.transports.gloo_tensors import as_bytes, check_tag, check_usable

_Group = Any  # a ProcessGroupGloo; torch's stubs do not know its operations


class GlooCommunicator(Communicator):
    """A communicator over Gloo, made by build_gloo. Any thread may send, receive, wait or abort.

    Collectives are matched by their order, so one thread starts them, in the same order on all ranks.
    """

    flight: FlightRecord

    def __init__(
        self,
        group: _Group,
        generation: int,
        global_rank: int,
        world_size: int,
        abort_flag: AbortFlag,
        timeout_s: float,
    ) -> None:
        self.timeout_s = timeout_s
        self.generation = generation
        self.global_rank = global_rank
        self.world_size = world_size
        self.abort_flag = abort_flag
        self.flight = FlightRecord("gloo", generation, global_rank, abort_flag)
        self._group = group
        self._alltoalls = 0
        self._brief = BriefWaits()
        self._retire_lock = threading.Lock()
        self._is_retired = False

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM) -> Pending:
        check_usable(tensor)
        carrier = carrier_of(tensor, op)
        return self._start(
            "allreduce",
            lambda: self._group.allreduce([carrier.tensor], OPTIONS[carrier.op]),
            tensor,
            self._finish_of(carrier, op),
        )

    def reduce(self, tensor: torch.Tensor, destination: int, op: ReduceOp = ReduceOp.SUM) -> Pending:
        check_usable(tensor)
        self._check_rank(destination)
        carrier = carrier_of(tensor, op)
        options = dist.ReduceOptions()
        options.rootRank = destination
        options.reduceOp = OPERATIONS[carrier.op]
        return self._start(
            "reduce",
            lambda: self._group.reduce([carrier.tensor], options),
            tensor,
            self._finish_of(carrier, op) if self.global_rank == destination else None,
        )

    def _finish_of(self, carrier: Carrier, op: ReduceOp) -> Callable[[], None] | None:
        if op is not ReduceOp.AVG:
            return carrier.bring_back

        def finish() -> None:
            divide(carrier.tensor, self.world_size)
            if carrier.bring_back is not None:
                carrier.bring_back()

        return finish

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        check_usable(tensor)
        self._check_rank(source)
        options = dist.BroadcastOptions()
        options.rootRank = source
        data = as_bytes(tensor)
        return self._start("broadcast", lambda: self._group.broadcast([data], options), tensor)

    def allgather(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_usable(output)
        check_usable(tensor)
        check_allgather(self.world_size, output, tensor)
        if not tensor.numel():
            return DonePending()
        parts = self._parts_of(output)
        data = as_bytes(tensor)
        return self._start("allgather", lambda: self._group.allgather([parts], [data]), tensor)

    def gather(self, output: torch.Tensor | None, tensor: torch.Tensor, destination: int) -> Pending:
        check_usable(tensor)
        self._check_rank(destination)
        is_destination = self.global_rank == destination
        check_gather(self.world_size, output, tensor, is_destination)
        options = dist.GatherOptions()
        options.rootRank = destination
        parts: list[list[torch.Tensor]] = []
        if is_destination and output is not None:
            check_usable(output)
            parts = [self._parts_of(output)]
        data = as_bytes(tensor)
        return self._start("gather", lambda: self._group.gather(parts, [data], options), tensor)

    def scatter(self, output: torch.Tensor, tensor: torch.Tensor | None, source: int) -> Pending:
        check_usable(output)
        self._check_rank(source)
        is_source = self.global_rank == source
        check_scatter(self.world_size, output, tensor, is_source)
        options = dist.ScatterOptions()
        options.rootRank = source
        parts: list[list[torch.Tensor]] = []
        if is_source and tensor is not None:
            check_usable(tensor)
            parts = [self._parts_of(tensor)]
        into = as_bytes(output)
        return self._start("scatter", lambda: self._group.scatter([into], parts, options), output)

    def _parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return list(as_bytes(tensor).view(self.world_size, -1).unbind(0)) if tensor.numel() else []

    def alltoall_v(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Pending:
        check_alltoall_v(self.world_size, output, tensor, output_splits, input_splits)
        check_usable(output)
        check_usable(tensor)
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        into = as_bytes(output).view(output.shape[0], row_bytes)
        data = as_bytes(tensor).view(tensor.shape[0], row_bytes)
        splits = (list(output_splits), list(input_splits))
        options = dist.AllToAllOptions()
        # Who has nothing to send may have something to receive, so rows decide and not elements.
        return self._start(
            "alltoall_v",
            lambda: self._group.alltoall_base(into, data, *splits, options),
            tensor,
            is_empty=not row_bytes,
        )

    def alltoall(self, output: torch.Tensor, tensor: torch.Tensor) -> Pending:
        check_alltoall(self.world_size, output, tensor)
        return self._alltoall("alltoall", output, tensor, None)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM
    ) -> Pending:
        # Gloo's own is a whole allreduce of which each rank keeps a part: twice the traffic.
        check_reduce_scatter(self.world_size, output, tensor)
        check_reducible(tensor.dtype, op)
        parts = torch.empty_like(tensor)
        return self._alltoall(
            "reduce_scatter", parts, tensor, lambda: reduce_parts(parts.unbind(0), op, output)
        )

    def _alltoall(
        self, what: str, output: torch.Tensor, tensor: torch.Tensor, finish: Callable[[], None] | None
    ) -> Pending:
        check_usable(output)
        check_usable(tensor)
        into, data, options = as_bytes(output), as_bytes(tensor), dist.AllToAllOptions()
        if slices.alltoall_pays(self.world_size, data.numel() // self.world_size):
            return self._alltoall_in_turns(what, into, data, finish)
        return self._start(
            what, lambda: self._group.alltoall_base(into, data, [], [], options), tensor, finish
        )

    def swap(
        self, outgoing: Sequence[torch.Tensor], incoming: Mapping[int, Sequence[torch.Tensor]], tag: int
    ) -> list[Pending]:
        for tensor in (*outgoing, *(t for theirs in incoming.values() for t in theirs)):
            check_usable(tensor)
        for peer in incoming:
            self._check_rank(peer)
        check_tag(tag + len(outgoing))
        begun: list[Pending] = []
        for i, tensor in enumerate(outgoing):
            arriving = {peer: theirs[i] for peer, theirs in incoming.items()}
            # by size alone, as the other side does: a sender in slices needs a receiver in slices
            if tensor.nbytes > slices.SLICE_BYTES and arriving:
                begun.append(self._swap_in_turns(tensor, arriving, tag + i))
            else:
                begun += super().swap([tensor], {peer: [into] for peer, into in arriving.items()}, tag + i)
        return begun

    def _swap_in_turns(
        self, outgoing: torch.Tensor, incoming: Mapping[int, torch.Tensor], tag: int
    ) -> Pending:
        data, into = as_bytes(outgoing), {peer: as_bytes(tensor) for peer, tensor in incoming.items()}
        return self._in_turns(
            "swap",
            slices.swap_turns(list(incoming), data.numel()),
            lambda _: data,
            into.__getitem__,
            lambda _: tag,
            data.numel(),
            is_collective=False,
        )

    def _alltoall_in_turns(
        self, what: str, into: torch.Tensor, data: torch.Tensor, finish: Callable[[], None] | None
    ) -> Pending:
        self._alltoalls += 1
        first_tag = slices.alltoall_tag(self._alltoalls)
        parts, arriving = data.view(self.world_size, -1), into.view(self.world_size, -1)
        arriving[self.global_rank] = parts[self.global_rank]
        return self._in_turns(
            what,
            slices.alltoall_turns(self.global_rank, self.world_size, parts.shape[1]),
            parts.__getitem__,
            arriving.__getitem__,
            lambda number: first_tag + number,
            data.numel(),
            is_collective=True,
            finish=finish,
        )

    def _in_turns(
        self,
        what: str,
        turns: Iterable[slices.Turn],
        message_to: Callable[[int], torch.Tensor],
        message_from: Callable[[int], torch.Tensor],
        tag_of: Callable[[int], int],
        size_bytes: int,
        is_collective: bool,
        finish: Callable[[], None] | None = None,
    ) -> Pending:
        """Sends and receives all slices in one thread, because Gloo's pairwise operations only progress in waits."""
        group, limit = self._group, timedelta(seconds=self.timeout_s)

        def run() -> None:
            under_way: deque[tuple[slices.Turn, dist.Work, dist.Work]] = deque()
            under_way_bytes = 0
            for turn in turns:
                if self.abort_flag.is_set():
                    raise RuntimeError(self.abort_flag.reason or "aborted")
                part, tag = slice(turn.begin, turn.end), tag_of(turn.number)
                sent = group.send([message_to(turn.destination)[part]], turn.destination, tag)
                received = group.recv([message_from(turn.source)[part]], turn.source, tag)
                under_way.append((turn, sent, received))
                under_way_bytes += turn.size
                traffic.to_collectives.add(turn.size)
                while under_way_bytes > slices.WINDOW_BYTES and under_way[0][0].round < turn.round:
                    under_way_bytes -= _wait_for(under_way.popleft(), limit)
            while under_way:
                _wait_for(under_way.popleft(), limit)
            if finish is not None:
                with torch.no_grad():
                    finish()

        if self.abort_flag.is_set():
            return FailedPending(CollectiveAborted(self.abort_flag.reason or "aborted"))
        pending = GlooThreaded(self.abort_flag, self.retire, what, run, None)
        if is_collective:
            return self.flight.collective(what, size_bytes, pending)
        return self.flight.message(what, size_bytes, None, pending)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        check_usable(tensor)
        self._check_rank(destination)
        check_tag(tag)
        data = as_bytes(tensor)
        return self._start(
            "send",
            lambda: self._group.send([data], destination, tag),
            tensor,
            peer=destination,
            counts=tag != STATE_TAG,
        )

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Pending:
        check_usable(tensor)
        self._check_rank(source)
        check_tag(tag)
        data = as_bytes(tensor)
        return self._start("receive", lambda: self._group.recv([data], source, tag), tensor, peer=source)

    def abort(self, reason: str) -> None:
        self.retire()
        super().abort(reason)

    def close(self) -> None:
        super().close()
        with self._retire_lock:
            if self._is_retired:
                return  # something in it may still run
            self._is_retired = True
            held, self._group = [self._group], None
        # Joins Gloo's threads, 10 to 20 ms that no step should wait for. The list alone holds the group: the last
        # reference is dropped in that thread, also where it has ended before this one goes on. The interpreter waits
        # for the thread at its end: a daemon that comes back from Gloo then aborts the process.
        threading.Thread(target=held.clear, name="gloo-close").start()

    def retire(self) -> None:
        """Keeps this group from being destroyed: something in it may still run."""
        with self._retire_lock:
            if not self._is_retired:
                self._is_retired = True
                retired_groups.retire(self._group)

    def _check_rank(self, global_rank: int) -> None:
        if not 0 <= global_rank < self.world_size:
            raise ValueError(f"global_rank {global_rank} is not in a world of {self.world_size}")

    def _start(
        self,
        what: str,
        begin: Callable[[], dist.Work],
        tensor: torch.Tensor,
        finish: Callable[[], None] | None = None,
        is_empty: bool | None = None,
        peer: int | None = None,
        counts: bool = True,
    ) -> Pending:
        """Begins an operation.

        finish: done once, by the first wait that sees the operation done.
        is_empty: no rank has anything to move; default: whether `tensor` is empty.
        peer: of a message between two.
        counts: as traffic of the script's steps.
        """
        if self.abort_flag.is_set():
            return FailedPending(CollectiveAborted(self.abort_flag.reason or "aborted"))
        if not tensor.numel() if is_empty is None else is_empty:
            return DonePending()
        if what != "receive" and counts and self.world_size > 1:
            traffic.to_collectives.add(tensor.nbytes)
        try:
            work = begin()
        except RuntimeError as error:
            self.retire()
            return FailedPending(collective_failed(what, error))
        if peer is None:
            collective = GlooCollective(self.abort_flag, self.retire, what, work, tensor, finish, self._brief)
            return self.flight.collective(what, tensor.nbytes, collective)
        # told anew: left to itself it is the limit for connecting that counts
        limit = timedelta(seconds=self.timeout_s)
        message = GlooThreaded(self.abort_flag, self.retire, what, lambda: work.wait(limit), tensor)
        return self.flight.message(what, tensor.nbytes, peer, message)


def build_gloo(
    generation: int,
    global_rank: int,
    world_size: int,
    store: Store,
    bind_host: str,
    timeout_s: float,
    abort_flag: AbortFlag,
    connect_timeout_s: float | None = None,
) -> GlooCommunicator:
    """Connects to all members of the generation through `store`. Blocks, for at most three times connect_timeout_s
    (default: timeout_s) for each beside the time-outs of the store, and no longer than until the generation is given
    up; see gloo_connect.py.

    global_rank, world_size: of this worker in the generation.
    bind_host: this worker's address, by which peers reach it.
    timeout_s: bounds every operation of the group.
    abort_flag: gives the generation up.
    Raises CollectiveFailed, CollectiveAborted.
    """
    limit_s = timeout_s if connect_timeout_s is None else connect_timeout_s
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=limit_s)
    watched = WatchedStore(store)
    doing = f"connecting generation {generation} from {bind_host}"
    try:
        # all connections are made now: a lazy one would put its cost, and its failure, into a step
        options._devices = [gloo.create_device(hostname=bind_host, lazy_init=False)]
        named = PrefixStore(f"bagua/generation/{generation}", watched)
        connecting = Connecting(lambda: gloo(named, global_rank, world_size, options), retired_groups.retire)
        group = connecting.group(watched, limit_s, abort_flag)
        group.set_timeout(timedelta(seconds=timeout_s))
    except CollectiveAborted:
        raise
    except CollectiveFailed as error:
        raise CollectiveFailed(f"{doing}: {error.detail}") from error
    except RuntimeError as error:
        raise collective_failed(doing, error) from error
    communicator = GlooCommunicator(group, generation, global_rank, world_size, abort_flag, timeout_s)
    if abort_flag.is_set():
        communicator.retire()
        raise CollectiveAborted(abort_flag.reason or "aborted")
    return communicator


def _wait_for(slice_under_way: tuple[slices.Turn, dist.Work, dist.Work], limit: timedelta) -> int:
    """Waits for a slice, and returns its size in bytes."""
    turn, *works = slice_under_way
    for work in works:
        work.wait(limit)
    return turn.size
