"""Reports the exit of each worker once, at once: one thread that waits on pidfds.

Reaps the worker (which kills what is left of its group) before it reports. Does not judge the exit:
see exit_cause.py.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.workers.exits.orphans import reap_orphans
from bagua_agent.workers.process.worker_process import WorkerProcess

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0


class ExitWatch:
    """Calls `on_exit(worker, returncode)` in its own thread, exactly once for every watched worker.

    on_failed: called once if the thread ends by an error; no exit is reported from then on.
    """

    def __init__(
        self,
        on_exit: Callable[[WorkerProcess, int], None],
        on_failed: Callable[[Failed], object] = lambda failed: None,
    ) -> None:
        self._on_exit = on_exit
        self._on_failed = on_failed
        self._new: deque[tuple[WorkerProcess, int]] = deque()  # with a pidfd of ours
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._thread = background_thread("exit-watch", self._run, self._ended)

    def start(self) -> None:
        self._thread.start()

    def watch(self, worker: WorkerProcess) -> None:
        """A worker that has ended already is reported too. Raises OSError if there is no descriptor left."""
        pidfd = worker.duplicate_pidfd()
        if pidfd is None:
            log.error("%r was closed before its exit was seen", worker)
            return
        self._new.append((worker, pidfd))
        self._wake()

    def stop(self) -> None:
        """No report comes after this returns. Must not be called from `on_exit`."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
            if self._thread.is_alive():
                log.error("exit-watch is still in its callback after %.0f s", STOP_TIMEOUT_S)
                return
        while self._new:
            os.close(self._new.popleft()[1])
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._on_failed(end)

    def _run(self) -> None:
        # poll, not epoll: a pidfd that its owner closes early must not fail our unregister
        with selectors.PollSelector() as selector:
            selector.register(self._wake_fd, selectors.EVENT_READ, None)
            while True:
                ready = selector.select()  # ends by the wake descriptor
                if self._stopping:
                    break
                for key, _ in ready:
                    if key.data is None:
                        os.eventfd_read(self._wake_fd)
                        self._add_new(selector)
                    else:
                        self._report(selector, key)
            for key in list(selector.get_map().values()):
                if key.data is not None:
                    os.close(key.fd)

    def _add_new(self, selector: selectors.BaseSelector) -> None:
        while self._new:
            worker, pidfd = self._new.popleft()
            selector.register(pidfd, selectors.EVENT_READ, worker)

    def _report(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        worker: WorkerProcess = key.data
        returncode = worker.reap()
        if returncode is None:
            return
        selector.unregister(key.fd)
        os.close(key.fd)
        reap_orphans()
        try:
            self._on_exit(worker, returncode)
        except Exception:
            # a fault of the callback's owner must not leave other workers unwatched
            log.exception("the report that %r ended with %d failed", worker, returncode)
