"""Records which process belongs to a unit, where there is no systemd to record it, and whether it lives.

The process records itself. The lock is taken before the process exists and passed to it, so a running unit always holds
it, whenever its daemon is killed. The lock ends with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.workers.process.process_status import PROC, stat_fields

RECORD = "process.json"
LOCK = "process.lock"


@dataclass(frozen=True, slots=True)
class UnitProcess:
    """The recorded process of a unit. started: in ticks since boot, which tells it from another process of its
    number."""

    pid: int
    started: int

    @property
    def is_alive(self) -> bool:
        return started_at(self.pid) == self.started


def record_process(folder: Path) -> None:
    """Records this process as the one of `folder`. The unit calls it."""
    started = started_at(os.getpid())
    unfinished = folder / f"{RECORD}.new"
    unfinished.write_text(json.dumps({"pid": os.getpid(), "started": started}))
    unfinished.rename(folder / RECORD)


def recorded_process(folder: Path) -> UnitProcess | None:
    """Returns the process that the unit recorded; None if it has not begun to run yet."""
    try:
        read = json.loads((folder / RECORD).read_text())
        return UnitProcess(int(read["pid"]), int(read["started"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_process(folder: Path) -> None:
    (folder / RECORD).unlink(missing_ok=True)


def take_lock(folder: Path) -> int:
    """Returns a descriptor for the process to be; the lock is held as long as any process has it open.

    Raises OSError, also if a process of this unit lives.
    """
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(folder: Path) -> bool:
    """Tells whether a process of this unit lives, recorded or not."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def started_at(pid: int) -> int | None:
    """Returns when this process began, in ticks since boot; None if it is over."""
    fields = stat_fields(PROC / str(pid))
    return None if fields is None or fields[0] in "ZX" else int(fields[19])
