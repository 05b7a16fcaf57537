"""Emulates cupy.cuda.nccl among threads and in ordinary memory, for NcclCommunicator's tests without a GPU.

Of NCCL's two ways to be late it always takes the first: a call answers "in progress" until all its peers have made
theirs, and is done when they have. As the real one it refuses a call on a communicator that is still at another, and
matches collectives by their order and messages by order alone. Buffers are addresses.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.devices.device_order import Moment, PastMoment
from bagua_core.communication.nccl.nccl import NcclCommunicator
from bagua_core.communication.nccl.nccl_library import IN_PROGRESS, Nccl

REMOTE_ERROR, INVALID_USAGE = 6, 5
TYPES = {
    "NCCL_INT8": torch.int8,
    "NCCL_UINT8": torch.uint8,
    "NCCL_INT32": torch.int32,
    "NCCL_INT64": torch.int64,
    "NCCL_FLOAT16": torch.float16,
    "NCCL_BFLOAT16": torch.bfloat16,
    "NCCL_FLOAT32": torch.float32,
    "NCCL_FLOAT64": torch.float64,
}
# as in nccl.h
NUMBERS = {
    "NCCL_INT8": 0,
    "NCCL_UINT8": 1,
    "NCCL_INT32": 2,
    "NCCL_INT64": 4,
    "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7,
    "NCCL_FLOAT64": 8,
    "NCCL_BFLOAT16": 9,
}
_DTYPE = {NUMBERS[name]: dtype for name, dtype in TYPES.items()}
SUM, PROD, MAX, MIN = range(4)


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        if status == IN_PROGRESS:
            raise KeyError(status)  # as CuPy's, which has no text for it
        super().__init__(f"NCCL status {status}")
        self.status = status


@dataclass(eq=False)
class _Call:
    """One rank's part of something."""

    what: tuple[Any, ...]
    send: int = 0
    receive: int = 0
    count: int = 0
    dtype: torch.dtype = torch.uint8
    done: bool = False


@dataclass
class _World:
    """All ranks of one NCCL communicator."""

    size: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    collectives: list[dict[int, _Call]] = field(default_factory=list)
    sends: dict[tuple[int, int], deque[_Call]] = field(default_factory=dict)
    receives: dict[tuple[int, int], deque[_Call]] = field(default_factory=dict)
    failed: bool = False


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    size_bytes = count * dtype.itemsize
    return torch.frombuffer((ctypes.c_char * size_bytes).from_address(address), dtype=dtype)


class Handle:
    """One rank's communicator, with CuPy's names. calls: what was asked of it, in order."""

    def __init__(self, module: Module, world: _World, rank: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ended = ""
        self._module = module
        self._world = world
        self._rank = rank
        self._number = 0
        self._open: list[_Call] = []

    # -- collectives

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._collective(_Call(("allReduce", op), sendbuf, recvbuf, count, _DTYPE[datatype]), stream)

    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None:
        self._collective(_Call(("reduce", op, root), sendbuf, recvbuf, count, _DTYPE[datatype]), stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._collective(_Call(("broadcast", root), sendbuff, recvbuff, count, _DTYPE[datatype]), stream)

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        self._collective(_Call(("allGather",), sendbuf, recvbuf, count, _DTYPE[datatype]), stream)

    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None:
        self._collective(_Call(("reduceScatter", op), sendbuf, recvbuf, recvcount, _DTYPE[datatype]), stream)

    def _collective(self, call: _Call, stream: int) -> None:
        self._admit(call.what[0], stream)
        assert not self._module.in_group()
        world = self._world
        with world.lock:
            while len(world.collectives) <= self._number:
                world.collectives.append({})
            parts = world.collectives[self._number]
            self._number += 1
            parts[self._rank] = call
            if len(parts) == world.size:
                _perform([parts[r] for r in range(world.size)])
        self._wait_for([call])

    # -- messages

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._admit("send", stream)
        self._in_group(_Call(("send", peer), sendbuf, 0, count, _DTYPE[datatype]))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._admit("recv", stream)
        self._in_group(_Call(("recv", peer), 0, recvbuf, count, _DTYPE[datatype]))

    def _in_group(self, call: _Call) -> None:
        assert self._module.in_group(), "alone it would wait for its peer, and the next call for it"
        self._module.group().append((self, call))

    def post(self, calls: list[_Call]) -> None:
        """The group ends."""
        world, own = self._world, self._rank
        with world.lock:
            for call in calls:
                kind, peer = call.what
                channel = (own, peer) if kind == "send" else (peer, own)
                ours, theirs = (
                    (world.sends, world.receives) if kind == "send" else (world.receives, world.sends)
                )
                waiting = theirs.get(channel)
                if not waiting:
                    ours.setdefault(channel, deque()).append(call)
                    continue
                other = waiting.popleft()
                source, target = (call, other) if kind == "send" else (other, call)
                assert source.count == target.count, "both ends speak of one message"
                ctypes.memmove(target.receive, source.send, source.count * source.dtype.itemsize)
                call.done = other.done = True
        self._wait_for(calls)

    # -- state

    def _admit(self, what: str, stream: int) -> None:
        self.calls.append((what, stream))
        if self.ended or (not self._module.in_group() and not all(c.done for c in self._open)):
            raise NcclError(INVALID_USAGE)

    def _wait_for(self, calls: list[_Call]) -> None:
        self._open = calls
        self.check_async_error()

    def check_async_error(self) -> None:
        with self._world.lock:
            if all(c.done for c in self._open):
                return
            raise NcclError(REMOTE_ERROR if self._world.failed else IN_PROGRESS)

    def abort(self) -> None:
        self.ended = "aborted"

    def destroy(self) -> None:
        self.ended = "destroyed"

    def lose(self) -> None:
        """A peer dies, and NCCL notices."""
        with self._world.lock:
            self._world.failed = True


def _perform(parts: list[_Call]) -> None:
    kind, *more = parts[0].what
    assert all(p.what == parts[0].what and p.dtype is parts[0].dtype for p in parts), [p.what for p in parts]
    count, dtype, size = parts[0].count, parts[0].dtype, len(parts)
    own_count = count * size if kind == "reduceScatter" else count
    inputs = [_memory(p.send, own_count, dtype).clone() for p in parts]
    for rank, part in enumerate(parts):
        if kind == "broadcast":
            _memory(part.receive, count, dtype).copy_(inputs[more[0]])
        elif kind == "allGather":
            _memory(part.receive, count * size, dtype).copy_(torch.cat(inputs))
        elif kind == "reduceScatter":
            _memory(part.receive, count, dtype).copy_(_reduced(inputs, more[0])[rank * count :][:count])
        elif kind == "allReduce" or rank == more[1]:
            _memory(part.receive, count, dtype).copy_(_reduced(inputs, more[0]))
        part.done = True


def _reduced(inputs: list[torch.Tensor], op: int) -> torch.Tensor:
    """Rounded at every rank, as the real one does."""
    total = inputs[0].clone()
    for part in inputs[1:]:
        match op:
            case 0:
                total += part
            case 1:
                total *= part
            case 2:
                total = torch.maximum(total, part)
            case 3:
                total = torch.minimum(total, part)
    return total


class Module:
    """cupy.cuda.nccl."""

    NcclError = NcclError
    NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN = SUM, PROD, MAX, MIN

    def __init__(self) -> None:
        self._local = threading.local()
        for name, number in NUMBERS.items():
            setattr(self, name, number)

    def group(self) -> list[tuple[Handle, _Call]]:
        found: list[tuple[Handle, _Call]] = self._local.group
        return found

    def in_group(self) -> bool:
        return getattr(self._local, "group", None) is not None

    def groupStart(self) -> None:
        assert not self.in_group()
        self._local.group = []

    def groupEnd(self) -> None:
        group, self._local.group = self.group(), None
        assert group
        handle = group[0][0]
        assert all(h is handle for h, _ in group)
        handle.post([call for _, call in group])


class EmulatedStream:
    """Work is done when it is given to it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def now(self) -> Moment:
        return PastMoment()

    def mark(self) -> Moment:
        return PastMoment()

    def on_it(self) -> AbstractContextManager[object]:
        return nullcontext()

    def uses(self, tensor: torch.Tensor) -> None:
        return None

    def give_back(self) -> None:
        return None


def emulated_world(world_size: int, generation: int = 1) -> list[NcclCommunicator]:
    module = Module()
    nccl = Nccl(module)
    worlds = [_World(world_size), _World(world_size)]
    return [
        NcclCommunicator(
            nccl,
            (Handle(module, worlds[0], r), EmulatedStream(1)),
            (Handle(module, worlds[1], r), EmulatedStream(2)),
            torch.device("cpu"),
            generation,
            r,
            world_size,
            AbortFlag(),
        )
        for r in range(world_size)
    ]
