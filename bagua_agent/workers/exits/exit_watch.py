"""Reports the exit of each worker once, at once.

Reaps the worker (which kills what is left of its group) before it reports. Does not judge the exit:
see exit_cause.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from bagua_agent.base.background import Failed
from bagua_agent.base.pid_watch import PidWatch
from bagua_agent.workers.exits.orphans import reap_orphans
from bagua_agent.workers.process.worker_process import WorkerProcess

log = logging.getLogger(__name__)


class ExitWatch:
    """Calls `on_exit(worker, returncode)` in a thread of its own, exactly once for every watched worker.

    on_failed: called once if the thread ends by an error; no exit is reported from then on.
    """

    def __init__(
        self,
        on_exit: Callable[[WorkerProcess, int], None],
        on_failed: Callable[[Failed], object] = lambda failed: None,
    ) -> None:
        self._on_exit = on_exit
        self._watch = PidWatch("exit-watch", self._report, on_failed)
        self.start, self.stop = self._watch.start, self._watch.stop

    def watch(self, worker: WorkerProcess) -> None:
        """Adds a worker; one that has ended already is reported too. Raises OSError if there is no descriptor left."""
        pidfd = worker.duplicate_pidfd()
        if pidfd is None:
            log.error("%r was closed before its exit was seen", worker)
            return
        self._watch.add(worker, pidfd)

    def _report(self, worker: WorkerProcess) -> None:
        returncode = worker.reap()
        assert returncode is not None, "a pidfd is readable once its process has ended"
        reap_orphans()
        self._on_exit(worker, returncode)
