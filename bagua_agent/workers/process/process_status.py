"""Reads a process's status from /proc; a process that ends meanwhile is ordinary.

Owns the parsing of /proc/<pid>. Judges nothing. A part that may not be read (kernel stacks, without privileges)
is empty.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
STOPPED_STATES = frozenset("Tt")  # by a signal, by a debugger
COMMAND_CHARACTERS = 200
_MOST_BYTES = 1 << 16  # of a file in /proc
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ThreadStatus:
    """The status of one thread. state: one letter, as in ps. wchan: the kernel function it sleeps in; empty if it
    runs."""

    tid: int
    name: str
    state: str
    cpu_s: float
    wchan: str
    kernel_stack: str


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    pid: int
    parent_pid: int
    command: str
    threads: tuple[ThreadStatus, ...]

    @property
    def state(self) -> str:
        """The state of its main thread; empty if it is gone."""
        return next((t.state for t in self.threads if t.tid == self.pid), "")

    @property
    def is_stopped(self) -> bool:
        return self.state in STOPPED_STATES and bool(self.state)

    @property
    def cpu_s(self) -> float:
        return sum(t.cpu_s for t in self.threads)


@dataclass(frozen=True, slots=True)
class SignalStatus:
    """The state of one signal in one process. blocked_in: threads that hold it back, those in its handler among
    them."""

    caught: bool
    pending: bool
    blocked_in: frozenset[int]


def process_status(pid: int) -> ProcessStatus | None:
    """Reads the status of a process; None if there is no such process."""
    fields = stat_fields(PROC / str(pid))
    if fields is None:
        return None
    threads = []
    for task in _tasks(pid):
        stat = stat_fields(task)
        if stat is not None:
            threads.append(_thread(task, stat))
    return ProcessStatus(pid, int(fields[1]), _command(pid), tuple(threads))


def is_stopped(pid: int) -> bool:
    """Tells whether a process is stopped; False if it is gone. Costs less than the status of all threads."""
    fields = stat_fields(PROC / str(pid))
    return fields is not None and fields[0] in STOPPED_STATES


def held_in_kernel(pid: int) -> str:
    """Describes a process that does not end, as "process 7 is in state D (nfs_wait_bit_killable)"."""
    status = process_status(pid)
    if status is None:
        return f"process {pid} has just ended"
    # its main thread may be a zombie, while another one is held
    held = [t for t in status.threads if t.state not in "ZX"] or list(status.threads)
    where = ", ".join(dict.fromkeys(t.wchan for t in held if t.wchan))
    return f"process {pid} is in state {held[0].state if held else '?'}" + (f" ({where})" if where else "")


def processes_of(pid: int) -> list[int]:
    """Returns the process, then what descends from it or is of its session, by process id."""
    parents: dict[int, int] = {}
    sessions: dict[int, int] = {}
    for process_id, fields in all_stat_fields():
        if fields[0] not in "ZX":
            parents[process_id] = int(fields[1])
            sessions[process_id] = int(fields[3])
    found = {pid} | {p for p, session in sessions.items() if session == pid}
    grown = True
    while grown:
        more = {p for p, parent in parents.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return [pid, *sorted(found - {pid})]


def signal_status(pid: int, number: int) -> SignalStatus | None:
    """Reads the state of a signal in a process; None if the process is gone."""
    caught = pending = seen = False
    blocked = set()
    bit = 1 << (number - 1)
    for task in _tasks(pid):
        masks = _masks(task)
        if masks is None:
            continue
        seen = True
        caught = caught or bool(masks["SigCgt"] & bit)
        pending = pending or bool((masks["SigPnd"] | masks["ShdPnd"]) & bit)
        if masks["SigBlk"] & bit:
            blocked.add(int(task.name))
    return SignalStatus(caught, pending, frozenset(blocked)) if seen else None


def user_ids(pid: int) -> set[int]:
    """Returns the real, effective, saved and file system's user ids; none if the process is gone."""
    for line in _read(PROC / str(pid) / "status").splitlines():
        if line.startswith("Uid:"):
            return {int(uid) for uid in line.split()[1:]}
    return set()


def _tasks(pid: int) -> Iterator[Path]:
    try:
        yield from sorted((PROC / str(pid) / "task").iterdir(), key=lambda task: int(task.name))
    except OSError:
        return


def _masks(task: Path) -> dict[str, int] | None:
    text = _read(task / "status")
    lines = (line.partition(":") for line in text.splitlines())
    masks = {name: int(value, 16) for name, _, value in lines if name.startswith("Sig") and name != "SigQ"}
    shared = [line for line in text.splitlines() if line.startswith("ShdPnd:")]
    if not masks or not shared:
        return None
    return {**masks, "ShdPnd": int(shared[0].partition(":")[2], 16)}


def stat_fields(directory: Path) -> list[str] | None:
    """Returns state, parent, group, session, ...: the fields behind the name, which may hold anything. directory: of a
    process or a thread in /proc. None if it is gone."""
    fields = _read(directory / "stat").rpartition(")")[2].split()
    return fields if len(fields) > 12 else None


def all_stat_fields() -> Iterator[tuple[int, list[str]]]:
    """Yields (process id, fields) of every process; one that ends meanwhile is left out."""
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := stat_fields(entry)) is not None:
            yield int(entry.name), fields


def _thread(task: Path, stat: list[str]) -> ThreadStatus:
    wchan = _read(task / "wchan").strip()
    return ThreadStatus(
        tid=int(task.name),
        name=_read(task / "comm").strip(),
        state=stat[0],
        cpu_s=(int(stat[11]) + int(stat[12])) / _TICKS_PER_S,
        wchan="" if wchan == "0" else wchan,
        kernel_stack=_read(task / "stack").strip(),
    )


def _command(pid: int) -> str:
    words = _read(PROC / str(pid) / "cmdline").replace("\0", " ").split()  # python -c may hold whole programs
    return " ".join(words)[:COMMAND_CHARACTERS]


def _read(path: Path) -> str:
    """Reads the beginning of a file in /proc: a process may say of any part of its memory that it is its command
    line."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""  # it ended, or may not be read
