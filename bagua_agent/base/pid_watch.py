"""Reports the end of processes, which need not be our children: once each and at once, from one thread."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.readable import readable

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0

T = TypeVar("T")


class PidWatch(Generic[T]):
    """Watches processes from `start` to `stop`. on_end(watched): the process has ended; if it raises, that is our bug,
    which is logged.

    on_failed: called once if the thread ends by an error; no end is reported from then on.
    """

    def __init__(
        self,
        name: str,
        on_end: Callable[[T], object],
        on_failed: Callable[[Failed], object] = lambda failed: None,
    ) -> None:
        """Makes the watch, which `start` starts. name: of the thread."""
        self._name = name
        self._on_end = on_end
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._watched: dict[int, T] = {}  # by pidfd
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = background_thread(name, self._run, self._ended)

    def start(self) -> None:
        self._thread.start()

    def add(self, watched: T, pidfd: int) -> None:
        """Adds a process; one that has ended already is reported too. pidfd: closed here."""
        with self._lock:
            if self._wake_fd < 0:
                os.close(pidfd)
                return
            self._watched[pidfd] = watched
            os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Ends the watch: no report comes after this returns. May be called twice; must not be called from `on_end`."""
        with self._lock:
            if self._wake_fd < 0:
                return
            self._stopping = True
            os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("%s is still in its callback after %g s", self._name, STOP_TIMEOUT_S)
                return
        with self._lock:
            for descriptor in (*self._watched, self._wake_fd):
                os.close(descriptor)
            self._watched.clear()
            self._wake_fd = -1

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._on_failed(end)

    def _run(self) -> None:
        while True:
            with self._lock:
                watched = list(self._watched)
            ready = readable([self._wake_fd, *watched])
            if self._stopping:
                return
            for descriptor in ready:
                if descriptor == self._wake_fd:
                    os.eventfd_read(descriptor)
                else:
                    self._report(descriptor)

    def _report(self, pidfd: int) -> None:
        with self._lock:
            watched = self._watched.pop(pidfd)
            os.close(pidfd)
        try:
            self._on_end(watched)
        except Exception:
            # a fault of the callback's owner must not leave other processes unwatched
            log.exception("bug: the report that %r has ended failed", watched)
