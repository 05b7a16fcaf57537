"""Workers without torch: processes that do nothing, and their sessions, spoken by the test.

What the agents see is real: processes, exits, sockets, messages. Nothing trains, so a generation is in force when its
members say that they entered it. Good for many workers at once on few processors.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable, Mapping

import grpc
import psutil

from bagua_contract import session_pb2, session_pb2_grpc
from bagua_contract.records import PROTOCOL_VERSION

# A worker's command: ends with 0 when told by SIGTERM or when the file given to it appears.
COMMAND = ("sh", "-c", 'trap "exit 0" TERM; while [ ! -e "$0" ]; do sleep 1 & wait $!; done')
FINGERPRINT = {"model": "light"}


class LightWorker:
    """Ready as soon as it is welcome; enters every generation that lists it, and leaves when asked to."""

    def __init__(self, process: psutil.Process, environ: Mapping[str, str]) -> None:
        self.worker_id = environ["BAGUA_WORKER_ID"]
        self.generations: list[int] = []
        self._process = process
        self._outbox: queue.SimpleQueue[session_pb2.WorkerMessage | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(
            f"unix:{environ['BAGUA_SESSION_SOCKET']}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, worker_id=self.worker_id, pid=process.pid)
        self._outbox.put(session_pb2.WorkerMessage(hello=hello))
        stub = session_pb2_grpc.WorkerSessionStub(self._channel)  # type: ignore[no-untyped-call]
        self._stream = stub.Attach(iter(self._outbox.get, None), wait_for_ready=True)
        self._thread = threading.Thread(target=self._read, name=f"light-{self.worker_id}", daemon=True)
        self._thread.start()

    def say(self, message: session_pb2.WorkerMessage) -> None:
        self._outbox.put(message)

    def _read(self) -> None:
        leaving = False
        with contextlib.suppress(grpc.RpcError):  # the agent has ended
            for message in self._stream:
                kind = message.WhichOneof("kind")
                if kind == "welcome":
                    ready = session_pb2.Ready(store_address="127.0.0.1:1", fingerprint=FINGERPRINT)
                    self.say(session_pb2.WorkerMessage(ready=ready))
                elif kind == "leave":
                    leaving = True
                elif kind == "new_generation":
                    record = message.new_generation.generation
                    if any(m.worker_id == self.worker_id for m in record.members):
                        self.generations.append(record.number)
                        entered = session_pb2.Entered(generation=record.number, step=record.number)
                        self.say(session_pb2.WorkerMessage(entered=entered))
                    elif leaving and self.generations:
                        self.end()

    def end(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process.terminate()

    def close(self) -> None:
        self._outbox.put(None)
        self._channel.close()
        self._thread.join(5.0)


class LightWorkers:
    """Sessions for the workers below some agents. `attend` again when there may be new ones."""

    def __init__(self) -> None:
        self._known: dict[str, LightWorker] = {}

    def attend(self, agent_pids: Iterable[int]) -> list[LightWorker]:
        """Those that were attached just now."""
        new = []
        for pid in agent_pids:
            for process in _children(pid):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                    # before it is the command it is our runner, at the gate: its environment is the same
                    # (at the moment of its replacement the environment is empty)
                    environ = process.environ()
                    if not {"BAGUA_WORKER_ID", "BAGUA_SESSION_SOCKET"} <= environ.keys():
                        continue
                    worker_id = environ["BAGUA_WORKER_ID"]
                    if worker_id not in self._known:
                        self._known[worker_id] = LightWorker(process, environ)
                        new.append(self._known[worker_id])
        return new

    def close(self) -> None:
        for worker in self._known.values():
            worker.close()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []
