"""Ends workers: SIGTERM to the whole group, a grace period, SIGKILL. Always bounded.

Returns when the groups are gone, so that ports, GPUs and files they held are free. A process that the
kernel does not end (state D) is reported, not waited for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

from bagua_agent.base.readable import readable
from bagua_agent.workers.process.process_status import all_stat_fields
from bagua_agent.workers.process.worker_process import WorkerProcess

KILL_TIMEOUT_S = 5.0
GROUP_POLL_S = 0.005
HURRY_POLL_S = 0.1


def kill_group(worker: WorkerProcess) -> bool:
    """Sends SIGKILL to the worker's group at once. See `end_groups`."""
    return end_groups((worker,), 0.0)


def end_groups(
    workers: Sequence[WorkerProcess], grace_s: float, is_hurried: Callable[[], bool] = lambda: False
) -> bool:
    """Ends all of them together, within grace_s plus KILL_TIMEOUT_S seconds, and tells whether nothing of them runs any
    more.

    grace_s: between SIGTERM and SIGKILL; 0 sends only SIGKILL. A worker that was asked to end before gets no SIGTERM,
    and its grace counts from then on. is_hurried: asked again and again in that time, which ends when it returns True.
    The workers are reaped, and may be watched by an ExitWatch meanwhile, which still reports.
    """
    if grace_s > 0:
        asked_s = max((worker.ask_to_end(signal.SIGTERM) for worker in workers), default=0.0)
        _wait_for_leaders(workers, asked_s + grace_s, is_hurried)
    for worker in workers:
        worker.signal_group(signal.SIGKILL)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    _wait_for_leaders(workers, deadline)
    for worker in workers:
        worker.reap()
    return all([_wait_for_group(worker.pid, deadline) for worker in workers])


def _wait_for_leaders(
    workers: Sequence[WorkerProcess], deadline: float, is_hurried: Callable[[], bool] = lambda: False
) -> None:
    waiting = [fd for worker in workers if (fd := worker.duplicate_pidfd()) is not None]
    try:
        left = set(waiting)
        while left and (remaining_s := deadline - time.monotonic()) > 0 and not is_hurried():
            left.difference_update(readable(left, min(remaining_s, HURRY_POLL_S)))
    finally:
        for fd in waiting:
            os.close(fd)


def _wait_for_group(pgid: int, deadline: float) -> bool:
    # The kernel does not report when a group becomes empty, so this polls; members are dying by then.
    while is_group_running(pgid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(GROUP_POLL_S)
    return True


def is_group_running(pgid: int) -> bool:
    """Tells whether a process of the group runs. Zombies don't count: there may be no parent to reap them."""
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # another user's by now, so it is not the group we knew
    return any(int(fields[2]) == pgid and fields[0] not in "ZX" for _, fields in all_stat_fields())
