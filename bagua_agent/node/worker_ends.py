"""Records how this node's workers ended: the cause of each end, and how often workers of a slot ended in a row."""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass, field

from bagua_agent.workers.exits.exit_cause import ExitCause, exit_cause
from bagua_agent.workers.exits.memory_kills import MemoryKills
from bagua_agent.workers.output.log_layout import WorkerFiles
from bagua_agent.workers.process.foreign_files import read_ordinary
from bagua_agent.workers.process.worker_process import WorkerProcess

log = logging.getLogger(__name__)

# Where steps are not observed (restart mode), a worker that ran for so long has made progress.
KILLS_FORGOTTEN_S = 600.0


@dataclass(slots=True)
class NodeWorker:
    """One started worker. was_ready: it reached its first step boundary. has_committed: it has committed a step.
    asked_to_end: the agent signalled it. kills_in_a_row: see Failure; known once it has ended."""

    process: WorkerProcess
    files: WorkerFiles
    slot: int
    was_ready: bool = False
    has_committed: bool = False
    asked_to_end: bool = False
    kills_in_a_row: int = 0
    started_at_s: float = field(default_factory=time.monotonic)

    @property
    def worker_id(self) -> str:
        return self.process.worker_id


class WorkerEnds:
    """Records the ends of this node's workers. count: how many workers ended."""

    def __init__(self) -> None:
        self.count = 0
        self._early_crashes: dict[int, int] = {}  # by slot
        self._kills_in_a_row: dict[int, int] = {}  # by slot
        self._killed_for: dict[str, str] = {}
        self._memory_kills = MemoryKills()

    def will_be_killed(self, worker_id: str, why: str) -> None:
        """Records that this agent is about to kill the worker, and why."""
        self._killed_for[worker_id] = why

    def early_crashes(self, slot: int) -> int:
        """Returns how many workers of this slot in a row ended before their first step boundary."""
        return self._early_crashes.get(slot, 0)

    def add(self, worker: NodeWorker, returncode: int, stderr_tail: str) -> ExitCause:
        """Records the end of a worker and returns its cause. Sets kills_in_a_row of the worker."""
        slot = worker.slot
        killed_for = self._killed_for.pop(worker.worker_id, "")
        self.count += 1
        if worker.was_ready:
            self._early_crashes[slot] = 0
        elif not killed_for:
            self._early_crashes[slot] = self.early_crashes(slot) + 1
        from_outside = returncode < 0 and not killed_for and not worker.asked_to_end
        out_of_memory = ""
        if from_outside and -returncode == signal.SIGKILL:
            out_of_memory = self._memory_kills.record_of(worker.process.pid)
        cause = exit_cause(
            returncode, _error_text(worker), stderr_tail, killed_for=killed_for, out_of_memory=out_of_memory
        )
        killed = from_outside and not cause.script_failure
        count = kills_after(
            self._kills_in_a_row.get(slot, 0),
            killed=killed,
            has_committed=worker.has_committed,
            ran_s=time.monotonic() - worker.started_at_s,
        )
        self._kills_in_a_row[slot] = count
        worker.kills_in_a_row = count if killed else 0
        return cause


def kills_after(before: int, *, killed: bool, has_committed: bool, ran_s: float) -> int:
    """Returns how many workers of a slot were killed in a row without progress, once one more has ended.

    before: the count when it started. killed: by a signal from outside.
    """
    made_progress = has_committed or ran_s >= KILLS_FORGOTTEN_S
    return (0 if made_progress else before) + killed


def _error_text(worker: NodeWorker) -> str | None:
    """Returns the content of the worker's error file; None if there is none that can be used."""
    try:
        return read_ordinary(worker.files.error).decode(errors="replace") or None
    except FileNotFoundError:
        return None  # most workers leave none
    except OSError as error:
        log.warning("%s is not used: %s", worker.files.error, error.strerror)
        return None
