"""Watches the etcd that this node hosts and starts it again at the same address after it ended. One thread.

Owns the server. restart_plan.py decides when it starts again, and on which data. Its clients notice only an outage;
the caller informs those that must know the new process. The thread lives as long as the server, since a server dies
with the thread that started it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.errors import BaguaError, InfrastructureLost, StoreUnavailable
from bagua_agent.base.readable import readable
from bagua_agent.etcd.server.embedded import STOP_TIMEOUT_S, UNIX, EmbeddedEtcd, EtcdEnded, ServerTls
from bagua_agent.etcd.server.restart_plan import STEADY_S, End, GiveUp, How, plan

_THREAD_ENDS_S = 2 * STOP_TIMEOUT_S + 2.0  # SIGTERM, SIGKILL, and the probe that may be under way


class HostedEtcd:
    """A running etcd, kept up from `keep_up` to `stop`."""

    def __init__(self, server: EmbeddedEtcd, listen: str, tls: ServerTls | None = None) -> None:
        self._tls = tls
        self.endpoint = server.endpoint
        self.directory = server.directory
        self._listen = listen
        self._server = server
        self._up_since_s = time.monotonic()
        self._stopping = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

    @classmethod
    def start(cls, listen: str = UNIX, *, directory: Path, tls: ServerTls | None = None) -> HostedEtcd:
        """Starts etcd as EmbeddedEtcd.start does; the directory stays when it is stopped."""
        return cls(EmbeddedEtcd.start(listen, directory=directory, tls=tls), listen, tls)

    @property
    def pid(self) -> int:
        """The process id of the server that runs, or ran last."""
        return self._server.pid

    def keep_up(self, on_started: Callable[[int], object], tell: Callable[[str], object]) -> None:
        """Starts the server again whenever it ends from now on. To be called once.

        on_started(pid): for the server that runs now, and from the thread for each later one. tell(text): one line an
        incident, from the thread.
        """
        assert self._thread is None, "kept up already"
        on_started(self.pid)

        def ended(end: OperationEnd[None]) -> None:
            if isinstance(end, Failed):
                tell(
                    f"the watch over the etcd that this node hosts failed: {end.reason}; the etcd is not started "
                    "again; training goes on, but membership can't change any more"
                )

        self._thread = background_thread("bagua-hosted-etcd", lambda: self._run(on_started, tell), ended)
        self._thread.start()

    def stop(self) -> None:
        """Ends the server, and the thread. Raises InfrastructureLost if either does not end."""
        if self._wake_fd < 0:
            return
        self._stopping.set()
        os.eventfd_write(self._wake_fd, 1)
        if self._thread is not None:
            self._thread.join(_THREAD_ENDS_S)
            if self._thread.is_alive():
                raise InfrastructureLost(f"the watch over etcd (process {self.pid}) does not end")
        os.close(self._wake_fd)
        self._wake_fd = -1
        self._server.stop()

    # -- the thread

    def _run(self, on_started: Callable[[int], object], tell: Callable[[str], object]) -> None:
        row: list[End] = []
        while self._await_end():
            if time.monotonic() - self._up_since_s >= STEADY_S:
                row.clear()
            status = self._server.returncode
            assert status is not None
            if not row:
                tell(f"the etcd that this node hosts {_what(status)}; starting it again at {self.endpoint}")
            row.append(End(How.KILLED if status < 0 else How.ENDED, answered=True))
            if not self._start_again(row, tell):
                break
            on_started(self.pid)
        self._server.stop()  # here: it would be killed with the thread that started it

    def _await_end(self) -> bool:
        """Waits until the server has ended (True) or is to be stopped (False)."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:  # ended, and reaped by another caller
            return not self._stopping.is_set()
        try:
            readable([pidfd, self._wake_fd])  # ends by the wake descriptor
        finally:
            os.close(pidfd)
        return not self._stopping.is_set()

    def _start_again(self, row: list[End], tell: Callable[[str], object]) -> bool:
        """Starts a new server until one answers. Returns False if that is given up, or if it is to be stopped. Appends
        the ends of servers that never answered."""
        why = ""
        emptied = False
        while not self._stopping.is_set():
            next_one = plan(row)
            if isinstance(next_one, GiveUp):
                tell(
                    f"the etcd that this node hosts is given up after {next_one.in_vain} attempts to start it: "
                    f"{why}; training goes on, but membership can't change any more"
                )
                return False
            if self._stopping.wait(next_one.after_s):
                return False
            if next_one.empty and not emptied:
                emptied = True
                tell(f"etcd does not start on the data it left; starting it on none ({why})")
            try:
                self._server = EmbeddedEtcd.start(
                    self._listen,
                    directory=self.directory,
                    tls=self._tls,
                    empty=next_one.empty,
                    unwanted=self._stopping.is_set,
                )
            except (BaguaError, OSError) as error:  # no etcd any more, no process to be had
                why = str(error)
                row.append(End(_how(error), answered=False))
            else:
                self._up_since_s = time.monotonic()
                return True
        return False


def _how(error: Exception) -> How:
    if isinstance(error, EtcdEnded):
        return How.KILLED if error.status < 0 else How.ENDED
    return How.SILENT if isinstance(error, StoreUnavailable) else How.NOT_STARTED


def _what(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
