"""Reports the end of processes that need not be our children; once each, from a thread of its own."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from bagua_agent.base.background import Failed, OperationEnd, background_thread


class PidWatch:
    """on_end(name): after the process of that name has ended. on_failed: called once if the thread ends by an error; no
    end is reported from then on."""

    def __init__(
        self, on_end: Callable[[str], None], on_failed: Callable[[Failed], object] = lambda failed: None
    ) -> None:
        self._on_end = on_end
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = background_thread("bagua-pid-watch", self._run, self._ended)
        self._thread.start()

    def add(self, name: str, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_end(name)
            return
        with self._lock:
            self._names[descriptor] = name
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(5.0)
        for descriptor in (*self._names, self._wake):
            os.close(descriptor)

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._on_failed(end)

    def _run(self) -> None:
        while True:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                if self._stopping:
                    return
                for descriptor in self._names:
                    poll.register(descriptor, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._wake in ready:
                os.eventfd_read(self._wake)
            ended = []
            with self._lock:
                for descriptor in ready:
                    if descriptor in self._names:
                        ended.append(self._names.pop(descriptor))
                        os.close(descriptor)
            for name in ended:
                self._on_end(name)
