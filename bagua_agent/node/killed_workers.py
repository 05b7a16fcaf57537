"""Says which workers SIGKILL has not ended: a driver or a file system that does not answer holds them in the kernel.

The job may wait for such a worker's slot, and nothing else shows why. In the thread of the agent's loop alone.
"""

from __future__ import annotations

import time

from bagua_agent.base.timers import Timers
from bagua_agent.job_state.console import JobTerminal
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.workers.process.process_status import held_in_kernel

# a killed process is gone within a second, one that has to free a large memory within a few
ENDS_WITHIN_S = 10.0


class KilledWorkers:
    """Watches the workers that got SIGKILL, from construction on."""

    def __init__(self, workers: NodeWorkers, timers: Timers, terminal: JobTerminal) -> None:
        self._workers = workers
        self._timers = timers
        self._terminal = terminal
        workers.on_killed = self._killed

    def _killed(self, worker_id: str) -> None:
        at_s = time.monotonic() + ENDS_WITHIN_S
        self._timers.set_once(f"killed {worker_id}", at_s, lambda _: self._look(worker_id))

    def _look(self, worker_id: str) -> None:
        worker = self._workers.get(worker_id)
        if worker is None or worker.process.has_ended():
            return
        self._terminal.tell(
            f"worker in slot {worker.slot} has not ended {ENDS_WITHIN_S:g} s after SIGKILL: "
            f"{held_in_kernel(worker.process.pid)}; its slot gets no other worker before. A driver or a file system "
            "does not answer; if the process stays, reboot this host"
        )
