"""libnccl and cupy.cuda.nccl between threads or processes, over Gloo and in ordinary memory: for jobs without a GPU.

All of ours runs as it is: the meeting, the joining that does not block, NcclCommunicator. Tensors of "the GPU" are CPU
tensors that `is_of_gpu` names, so that the runtime's own small messages go the other way, as in a real job. A joining
is under way until all ranks are connected; a call is until its peers have made theirs.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, CollectiveFailed, Communicator, Pending, ReduceOp
from bagua_core.communication.nccl.nccl_library import IN_PROGRESS, Nccl
from bagua_core.communication.traffic import Counter
from bagua_core.communication.transport_choice import Ability
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.communication.transports.gpu_transport import NcclTransport
from bagua_core.communication.transports.meeting_store import MeetingServer, MeetingStore
from tests.core.communication import emulated_nccl
from tests.core.communication.emulated_nccl import INVALID_USAGE, NUMBERS, REMOTE_ERROR, EmulatedStream

VERSION = 22707
DEVICE = torch.device("cpu")
LIMIT_S = 30.0
_DTYPE = {NUMBERS[name]: dtype for name, dtype in emulated_nccl.TYPES.items()}
_OPS = {0: ReduceOp.SUM, 1: ReduceOp.PRODUCT, 2: ReduceOp.MAX, 3: ReduceOp.MIN}


def is_of_gpu(tensor: torch.Tensor) -> bool:
    """Gradients, weights and what is as large; none of the runtime's own tensors."""
    return tensor.is_floating_point() and tensor.numel() > 8


class Joined:
    """One rank's communicator, as the library knows it. calls: what was asked of it, in order."""

    def __init__(self) -> None:
        self.flag = AbortFlag()
        self.over: Communicator | None = None
        self.status = IN_PROGRESS
        self.ended = ""
        self.calls: list[str] = []
        self.open: list[Pending] = []
        self.sent: dict[tuple[str, int], int] = {}

    def join(self, address: str, world_size: int, rank: int, bind_host: str) -> None:
        host, _, port = address.rpartition(":")
        store: MeetingStore | None = None
        try:
            store = MeetingStore(host, int(port), LIMIT_S)
            self.flag.add_waiter(store.interrupt)
            prefix = PrefixStore("nccl/emulated", store)
            self.over = build_gloo(1, rank, world_size, prefix, bind_host, 3600.0, self.flag, LIMIT_S)
            self.status = 0
        except Exception:  # noqa: BLE001 (whatever it is, NCCL has a number for it)
            self.status = REMOTE_ERROR
        finally:
            if store is not None:
                self.flag.remove_waiter(store.interrupt)
                store.close()

    def end(self, how: str) -> None:
        self.ended = how
        if how == "aborted":
            self.flag.set("aborted")
            if self.over is not None:
                self.over.abort("aborted")
        elif self.over is not None:
            self.over.close()


class Emulation:
    """All that one process has of NCCL. joining(rank): called by each rank that joins, in a thread of its own."""

    def __init__(
        self, bind_host: str = "127.0.0.1", joining: Callable[[int], None] = lambda rank: None
    ) -> None:
        self.joined: dict[int, Joined] = {}
        self._numbers = itertools.count(1)
        self._bind_host = bind_host
        self._joining = joining
        self._servers: list[MeetingServer] = []
        self.library: Any = _Library(self)
        self.module = _Module(self)

    @property
    def calls(self) -> list[str]:
        return [call for joined in list(self.joined.values()) for call in joined.calls]

    def unique_id(self) -> bytes:
        self._servers.append(MeetingServer(self._bind_host))
        return f"{self._bind_host}:{self._servers[-1].port}".encode().ljust(128, b"\0")

    def begin(self, unique_id: bytes, world_size: int, rank: int) -> int:
        number, joined = next(self._numbers), Joined()
        self.joined[number] = joined

        def join() -> None:
            self._joining(rank)
            joined.join(unique_id.decode(), world_size, rank, self._bind_host)

        threading.Thread(target=join, name="emulated-nccl-join", daemon=True).start()
        return number

    def close(self) -> None:
        for joined in list(self.joined.values()):
            joined.end("aborted")
        for server in self._servers:
            server.close()

    def install(self, put: Callable[[Any, str, Any], None]) -> None:
        """put(module, name, value): as monkeypatch.setattr. From then on this process has NCCL, and counts no bytes of
        Gloo's as sent, since those of the emulation are among them."""
        from bagua_core.communication.nccl import nccl, nccl_ability, nccl_library
        from bagua_core.communication.transports import by_device, gloo

        streams = itertools.count(1)
        put(nccl_library, "load", lambda: Nccl(self.module))
        put(nccl_library, "loaded_library", lambda: self.library)
        put(nccl, "CudaStream", lambda device: EmulatedStream(next(streams)))
        put(torch.cuda, "set_device", lambda device: None)
        put(nccl_ability, "gpu_address", lambda device: os.environ.get("BAGUA_SLOT", "0"))
        put(by_device, "is_of_gpu", is_of_gpu)
        put(gloo, "traffic", SimpleNamespace(to_collectives=Counter()))


class _Library:
    """What nccl_join.py asks of libnccl."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self.ncclGetErrorString = _ErrorString()

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = VERSION
        return 0

    def ncclCommInitRankConfig(self, comm: Any, count: Any, unique_id: Any, rank: Any, config: Any) -> int:
        assert config._obj.blocking == 0
        comm._obj.value = self._emulation.begin(unique_id.internal, count.value, rank.value)
        return IN_PROGRESS

    def ncclCommGetAsyncError(self, comm: ctypes.c_void_p, state: Any) -> int:
        assert comm.value is not None
        state._obj.value = self._emulation.joined[comm.value].status
        return 0

    def ncclCommAbort(self, comm: ctypes.c_void_p) -> int:
        assert comm.value is not None
        self._emulation.joined[comm.value].end("aborted")
        return 0


class _ErrorString:
    restype: Any = None

    def __call__(self, status: Any) -> bytes:
        return f"emulated status {status.value}".encode()


def _memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    if not count:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


class _Module(emulated_nccl.Module):
    """cupy.cuda.nccl."""

    def __init__(self, emulation: Emulation) -> None:
        super().__init__()
        module = self

        class NcclCommunicator(ctypes.Structure):
            """Laid out as CuPy's: the last field is the communicator's address, here its number."""

            __slots__ = ()
            _fields_ = (("other", ctypes.c_void_p), ("address", ctypes.c_void_p))

            @property
            def comm(self) -> int:
                return self.address or 0

            def allReduce(self, send: int, to: int, count: int, kind: int, op: int, stream: int) -> None:
                data = self._moved(send, to, count, _DTYPE[kind])
                self._collective("allReduce", lambda c: c.allreduce(data, _OPS[op]))

            def reduce(
                self, send: int, to: int, count: int, kind: int, op: int, root: int, stream: int
            ) -> None:
                data = self._moved(send, to, count, _DTYPE[kind])
                self._collective("reduce", lambda c: c.reduce(data, root, _OPS[op]))

            def broadcast(self, send: int, to: int, count: int, kind: int, root: int, stream: int) -> None:
                data = self._moved(send, to, count, _DTYPE[kind])
                self._collective("broadcast", lambda c: c.broadcast(data, root))

            def allGather(self, send: int, to: int, count: int, kind: int, stream: int) -> None:
                data, size = _memory(send, count, _DTYPE[kind]), self._over.world_size
                into = _memory(to, count * size, _DTYPE[kind]).view(size, count)
                self._collective("allGather", lambda c: c.allgather(into, data))

            def reduceScatter(self, send: int, to: int, count: int, kind: int, op: int, stream: int) -> None:
                size = self._over.world_size
                data = _memory(send, count * size, _DTYPE[kind]).view(size, count)
                into = _memory(to, count, _DTYPE[kind])
                self._collective("reduceScatter", lambda c: c.reduce_scatter(into, data, _OPS[op]))

            def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
                data, tag = _memory(address, count, _DTYPE[kind]), self._next_tag("to", peer)
                self._message("send", lambda c: c.send(data, peer, tag))

            def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
                data, tag = _memory(address, count, _DTYPE[kind]), self._next_tag("from", peer)
                self._message("recv", lambda c: c.receive(data, peer, tag))

            def post(self, begun: Sequence[Callable[[Communicator], Pending]]) -> None:
                self._joined.open = [begin(self._over) for begin in begun]
                self.check_async_error()

            def check_async_error(self) -> None:
                waiting = self._joined.open
                if not all(pending.is_done() for pending in waiting):
                    emulated_nccl.NcclError(IN_PROGRESS)  # raises KeyError, as CuPy's
                try:
                    for pending in waiting:
                        pending.wait()
                except CollectiveFailed as error:
                    raise emulated_nccl.NcclError(REMOTE_ERROR) from error
                self._joined.open = []

            def abort(self) -> None:
                self._joined.end("aborted")

            def destroy(self) -> None:
                self._joined.end("destroyed")

            @property
            def _joined(self) -> Joined:
                return emulation.joined[self.comm]

            @property
            def _over(self) -> Communicator:
                over = self._joined.over
                assert over is not None
                return over

            @staticmethod
            def _moved(send: int, to: int, count: int, dtype: torch.dtype) -> torch.Tensor:
                data = _memory(to, count, dtype)
                if send != to:
                    data.copy_(_memory(send, count, dtype))
                return data

            def _collective(self, what: str, begin: Callable[[Communicator], Pending]) -> None:
                assert not module.in_group()
                self._admit(what)
                self.post([begin])

            def _message(self, what: str, begin: Callable[[Communicator], Pending]) -> None:
                assert module.in_group(), "alone it would wait for its peer, and the next call for it"
                self._admit(what)
                group: list[Any] = module.group()
                group.append((self, begin))

            def _next_tag(self, way: str, peer: int) -> int:
                sent = self._joined.sent
                sent[way, peer] = sent.get((way, peer), 0) + 1
                return sent[way, peer]

            def _admit(self, what: str) -> None:
                joined = self._joined
                joined.calls.append(what)
                if joined.ended or joined.open:
                    raise emulated_nccl.NcclError(INVALID_USAGE)

        self.NcclCommunicator = NcclCommunicator
        self.get_unique_id = emulation.unique_id

    @staticmethod
    def get_version() -> int:
        return VERSION


class TransportOfRank(NcclTransport):
    """What a rank among threads says of itself; it builds as every other does."""

    def __init__(
        self,
        gpu: str | None,
        obstacle: str = "",
        version: int = VERSION,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """gpu None: its script uses none. before: called before it builds."""
        self.gpus = () if gpu is None else (DEVICE,)
        facts = {"version": str(version), "gpu": gpu or "", "may_share": ""}
        self._ability = Ability(obstacle) if obstacle else Ability("", facts)
        self._before = before

    def ability(self, gpus: Sequence[torch.device]) -> Ability:
        return self._ability

    def build(self, *arguments: Any) -> Communicator:
        self._before()
        return super().build(*arguments)
