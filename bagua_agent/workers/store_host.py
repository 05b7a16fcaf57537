"""The agent's handle of the process that hosts torch.distributed's stores. The agent itself has no torch.

A fresh store for every generation of a restarted script, so that no key of the last one is left. Started at
the first `open`, and anew if it is gone (its stores are gone with it). The other side is
bagua_core/worker/store_host.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.config.job_config import CommandKind, WorkerCommand
from bagua_agent.workers.exits.termination import kill_group
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.request_socket import HelperGone, RequestSocket
from bagua_agent.workers.process.worker_process import WorkerProcess
from bagua_agent.workers.start.spawn import spawn_worker
from bagua_agent.workers.start.warm_parent import WarmParent
from bagua_agent.workers.start.worker_command import beside_runner

STARTED_TIMEOUT_S = 60.0  # it imports torch first, if it was not forked
ANSWER_TIMEOUT_S = 35.0
NOWHERE = Path(os.devnull)


class StoreHost:
    """The process that hosts the stores, started when it is needed. Call from threads that live as long as the agent.
    env: a worker's. warm: what to fork it from."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        directory: Path | None = None,
        warm: WarmParent | None = None,
        account: Account | None = None,
    ) -> None:
        self._env = dict(env)
        self._directory = directory
        self._warm = warm
        self._account = account
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._requests: RequestSocket | None = None

    @property
    def pid(self) -> int | None:
        process = self._process
        return None if process is None else process.pid

    def open(self, host: str, port: int = 0) -> int:
        """Opens a new, empty store and returns its port; 0 picks a free one. host: this node's address.

        Raises InfrastructureLost when the port is taken or the process does not answer; another try may work.
        """
        with self._lock:
            answer = self._ask_for_store(host, port)
            if not isinstance(answer.get("port"), int):
                raise InfrastructureLost(f"no store at {host}:{port}: {answer.get('error')}")
            return int(str(answer["port"]))

    def _ask_for_store(self, host: str, port: int) -> dict[str, object]:
        while True:
            is_new = self._requests is None
            try:
                return self._ask({"open": port, "host": host})
            except HelperGone as problem:
                self._end()
                if is_new:  # one that had died since it was last asked is no reason to fail
                    raise InfrastructureLost(f"the process for stores failed: {problem}") from problem

    def drop(self, port: int) -> bool:
        """Closes the store at `port`; returns False when there is none (any more)."""
        with self._lock:
            if self._requests is None:
                return False
            try:
                return self._ask({"drop": port}).get("dropped") is True
            except HelperGone:
                self._end()
                return False  # its stores ended with it

    def _ask(self, request: dict[str, object]) -> dict[str, object]:
        if self._process is not None and self._process.has_ended():
            self._end()
        timeout_s = ANSWER_TIMEOUT_S
        if self._requests is None:
            self._start()
            timeout_s += STARTED_TIMEOUT_S
        assert self._requests is not None
        return self._requests.ask(request, (), timeout_s)

    def _start(self) -> None:
        own, other = RequestSocket.pair()
        try:
            self._process = spawn_worker(
                WorkerCommand(CommandKind.RUN_PATH, str(beside_runner("store_host.py"))),
                self._env,
                worker_id="store-host",
                slot=0,
                directory=self._directory,
                gated=False,
                stdout=NOWHERE,
                stderr=NOWHERE,
                stdin=other.fileno(),
                preimport=(),
                warm=self._warm,
                account=self._account,
            )
        except BaseException:
            own.close()
            raise
        finally:
            other.close()
        self._requests = own

    def _end(self) -> None:
        requests, self._requests = self._requests, None
        process, self._process = self._process, None
        if requests is not None:
            requests.close()
        if process is not None:
            kill_group(process)
            process.close()

    def stop(self) -> None:
        """Closes every store and ends the process; bounded. May be called twice."""
        with self._lock:
            self._end()
