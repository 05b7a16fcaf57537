"""Finds the kernel's record of a process that it killed for lack of memory. Best effort, bounded, never raises.

The kernel's log names the process, if the agent may read it and the process ids are the host's; else the counter of
the agent's memory cgroup shows that a process in it was killed since the last check.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from bagua_contract.memory_cgroup import memory_cgroups

KERNEL_LOG = Path("/dev/kmsg")
MOST_RECORDS = 20_000  # more than the kernel's buffer of 1 MiB holds
_RECORD_BYTES = 8192
_SUMMARY_CHARACTERS = 160


class MemoryKills:
    """Finds out whether the kernel killed a process for lack of memory. kernel_log, root: other files for tests."""

    def __init__(self, kernel_log: Path = KERNEL_LOG, root: Path = Path("/")) -> None:
        self._kernel_log = kernel_log
        self._counters = _counters(root)
        self._killed = self._count()

    def record_of(self, pid: int) -> str:
        """Returns one line; "" if nothing shows that the kernel killed this process for lack of memory."""
        killed, self._killed = self._killed, self._count()
        if line := _line_about(pid, _records(self._kernel_log)):
            return line
        more = self._killed - killed
        return f"the kernel killed {more} process(es) of this cgroup for lack of memory" if more > 0 else ""

    def _count(self) -> int:
        for path in self._counters:
            try:
                found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
            except OSError:
                continue
            if found:
                return int(found[1])
        return 0


def _counters(root: Path) -> list[Path]:
    """Returns the files with an "oom_kill N" line: that of the agent's own group first."""
    try:
        groups = memory_cgroups(
            (root / "proc/self/cgroup").read_text(), (root / "proc/self/mountinfo").read_text()
        )
    except OSError:
        return []
    if groups is None:
        return []
    name = "memory.oom_control" if groups.version == 1 else "memory.events"
    return [root / folder.relative_to("/") / name for folder in groups.folders]


def _records(kernel_log: Path) -> Iterator[str]:
    """Yields the lines of the kernel's log. Each read of the device gives one record,
    "priority,number,time,flags;text"."""
    try:
        log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # no such device in a container, or not for this account
    try:
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(log, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # the record was overwritten meanwhile
            except OSError:
                return  # no more records
            if not record:
                return
            yield from record.decode(errors="replace").splitlines()
    finally:
        os.close(log)


def _line_about(pid: int, records: Iterator[str]) -> str:
    """Returns the last line about `pid`, because process ids are used again."""
    pattern = re.compile(rf";.*(?:[Oo]ut of memory|oom).*[Kk]ill(?:ed)? process {pid} \(")
    found = ""
    for record in records:
        if pattern.search(record):
            found = record.partition(";")[2]
    return found[:_SUMMARY_CHARACTERS]
