"""An agent's end of a session for tests: the real server, and a record of what workers said."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable

from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import session_pb2

DEADLINE_S = 20.0


class Agent:
    def __init__(self, *worker_ids: str, slots: int = 2, welcoming: bool = True) -> None:
        # not tmp_path: a socket's path has little room
        self._directory = tempfile.mkdtemp(prefix="bagua-test-")
        self.socket = f"{self._directory}/session.sock"
        self._changed = threading.Condition()
        self._heard: list[tuple[str, session_pb2.WorkerMessage]] = []
        self._ended: list[str] = []
        self.server = SessionServer(self.socket, slots, self._hear, self._end)
        for worker_id in worker_ids:
            self.server.expect(worker_id)
        if welcoming:
            self.server.admit("nonce-1")

    def _hear(self, worker_id: str, message: session_pb2.WorkerMessage) -> None:
        with self._changed:
            self._heard.append((worker_id, message))
            self._changed.notify_all()

    def _end(self, worker_id: str) -> None:
        with self._changed:
            self._ended.append(worker_id)
            self._changed.notify_all()

    def said_by(self, worker_id: str) -> list[session_pb2.WorkerMessage]:
        with self._changed:
            return [message for who, message in self._heard if who == worker_id]

    @property
    def ended(self) -> list[str]:
        with self._changed:
            return list(self._ended)

    def wait_for(self, claim: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(claim, DEADLINE_S), (self._heard, self._ended)

    def close(self) -> None:
        self.server.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
