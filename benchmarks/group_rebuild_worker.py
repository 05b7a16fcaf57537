"""One process of benchmarks/group_rebuild.py: forms groups, waits in one, and says what happened."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bagua_core.communication.communicator import AbortFlag, CollectiveFailed
from bagua_core.communication.transports.gloo import GlooCommunicator, build_gloo
from bagua_core.communication.transports.meeting_store import MeetingStore

SYSTEMS = {"bagua": "Bagua", "torch": "torch, reconfigured"}
WORKERS = 4
VALUES = 1 << 16
TIMEOUT_S = 10.0  # of collectives
_RELEASED_S = 1.0


def can_reconfigure() -> bool:
    """Whether this torch can give a process group new members."""
    return hasattr(dist, "_reconfigure")


class Group(ABC):
    @abstractmethod
    def handle(self) -> str:
        """By which the others reach this process in the next group."""

    @abstractmethod
    def form(self, number: int, handles: list[str], worker: int) -> None: ...

    @abstractmethod
    def allreduce(self, tensor: torch.Tensor) -> None:
        """In place; returns when it is complete."""


class BaguaGroup(Group):
    def __init__(self, worker: int, port: int) -> None:
        self._worker, self._port = worker, port
        self._communicator: GlooCommunicator | None = None

    def handle(self) -> str:
        return str(self._worker)

    def form(self, number: int, handles: list[str], worker: int) -> None:
        if self._communicator is not None:
            self._communicator.abort(f"generation {number} follows")
        store = MeetingStore("127.0.0.1", self._port, TIMEOUT_S)
        rank = handles.index(str(worker))
        self._communicator = build_gloo(
            number, rank, len(handles), store, "127.0.0.1", TIMEOUT_S, AbortFlag()
        )

    def allreduce(self, tensor: torch.Tensor) -> None:
        assert self._communicator is not None
        self._communicator.allreduce(tensor).wait()


class TorchGroup(Group):
    def __init__(self, worker: int, port: int) -> None:
        init: Any = dist.init_process_group
        # one store for all: with a store of each process the members do not find each other's keys (torch 2.15)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        init(
            "gloo",
            store=store,
            rank=worker,
            world_size=WORKERS,
            timeout=timedelta(seconds=TIMEOUT_S),
            enable_reconfigure=True,
        )

    def handle(self) -> str:
        return str(dist._get_reconfigure_handle())  # type: ignore[attr-defined]

    def form(self, number: int, handles: list[str], worker: int) -> None:
        dist._reconfigure(uuid=number, handles=handles).wait()  # type: ignore[attr-defined]

    def allreduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)


class Waiting:
    """An allreduce of the old group in a thread of its own."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.ended_s: float | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, CollectiveFailed):  # a member is lost; only the moment counts
            self._group.allreduce(torch.ones(VALUES))
        self.ended_s = time.monotonic()

    def ended_after(self, moment_s: float) -> float | None:
        deadline_s = time.monotonic() + _RELEASED_S
        while self.ended_s is None and time.monotonic() < deadline_s:
            time.sleep(0.001)
        return None if self.ended_s is None else max(0.0, self.ended_s - moment_s)


def serve(pipe: Connection, system: str, worker: int, port: int) -> None:
    """Does what comes from the pipe until it is killed. port: of the parent's store, of the system's kind."""
    torch.set_num_threads(1)
    group: Group = BaguaGroup(worker, port) if system == "bagua" else TorchGroup(worker, port)
    waiting: Waiting | None = None
    began_s = 0.0
    while True:
        order = pipe.recv()
        match order["do"]:
            case "handle":
                pipe.send(group.handle())
            case "form":
                began_s = time.monotonic()
                error = ""
                try:
                    group.form(order["number"], order["handles"], worker)
                    result = torch.ones(VALUES)
                    group.allreduce(result)
                    if int(result[0]) != len(order["handles"]):
                        error = f"the sum over {len(order['handles'])} members is {result[0]:g}"
                except (RuntimeError, CollectiveFailed) as raised:
                    error = str(raised).splitlines()[0]
                pipe.send({"first_s": time.monotonic() - began_s, "error": error})
            case "wait":
                waiting = Waiting(group)
                pipe.send("waits")
            case "released":
                assert waiting is not None
                pipe.send(waiting.ended_after(began_s))
