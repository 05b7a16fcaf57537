"""Saves the stacks of all threads of a node's workers beside each worker's logs.

Asks the worker's own thread for them (bagua_core/worker/stack_dump.py), and where that does not answer, since another
one holds the GIL, by the signal that is answered from C. Adds what /proc says. Owns the asking and the file; why it is
asked for is the caller's affair.
Invariants: bounded, whatever state a worker is in; a process that would die of the signal, or of another account than
the worker's, is never sent it; nothing is opened that a worker names.
Blocks: call it from a thread that may wait.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.workers.output.log_access import open_file
from bagua_agent.workers.process.account import Account
from bagua_agent.workers.process.bounded_run import run_bounded
from bagua_agent.workers.process.process_status import (
    ProcessStatus,
    SignalStatus,
    process_status,
    processes_of,
    signal_status,
    user_ids,
)
from bagua_agent.workers.process.stack_channel import COLLECTIVES_HEAD, WHOLE, StackChannel

WITHIN_S = 5.0  # for one worker with its children; workers are asked side by side
ANSWER_WITHIN_S = 2.0  # for one process: an answer takes milliseconds
# Its thread waits for the GIL, which Python hands over every 5 ms: no answer by then is none.
THREAD_ANSWERS_WITHIN_S = 0.5
LOOK_AGAIN_S = 0.005
NATIVE_WITHIN_S = 5.0
MOST_CHILDREN = 32
MOST_AT_ONCE = 16
FILES_KEPT = 10  # a script that saves checkpoints for minutes must not fill a disk with stacks
LARGEST_FILE_BYTES = 4 << 20  # of one worker with its children: what they answer is theirs to say


@dataclass(frozen=True, slots=True)
class StackTarget:
    """A worker whose stacks can be saved."""

    worker_id: str
    pid: int
    directory: Path  # where its logs lie
    channel: StackChannel | None  # None: an executable, which can't be asked
    account: Account | None = None  # None: the agent's own


@dataclass(frozen=True, slots=True)
class SavedStacks:
    """The result of saving one worker's stacks. path: None if nothing could be written. problem: why the worker's own
    Python stacks are missing or incomplete; empty if they are whole."""

    worker_id: str
    path: Path | None
    problem: str = ""


class NoAnswer(InfrastructureLost):
    """Raised if a process did not write its stacks, or not all of them. partial: what came."""

    def __init__(self, why: str, partial: str = "") -> None:
        super().__init__(why)
        self.partial = partial


def save_stacks(
    targets: Sequence[StackTarget], why: str, *, within_s: float = WITHIN_S, native: bool = True
) -> list[SavedStacks]:
    """Writes stacks-<time>.txt for each worker. Takes at most about within_s (plus NATIVE_WITHIN_S with py-spy).

    native: add what py-spy sees, where it is installed. Never raises for a worker's state.
    """
    if not targets:
        return []
    tool = shutil.which("py-spy") if native else None
    with ThreadPoolExecutor(min(len(targets), MOST_AT_ONCE), thread_name_prefix="stacks") as pool:
        return list(pool.map(lambda target: _save(target, why, within_s, tool), targets))


def readable_stacks(target: StackTarget, why: str, *, within_s: float = WITHIN_S) -> tuple[str, str]:
    """Returns the stacks of one worker with its children as text, and why its own Python stacks are missing or
    incomplete (empty if they are whole). Writes no file. Takes at most about within_s (plus NATIVE_WITHIN_S with
    py-spy)."""
    return _text_of(target, why, within_s, shutil.which("py-spy"))


def stacks_of(target: StackTarget, pid: int, within_s: float = ANSWER_WITHIN_S) -> str:
    """Returns the Python stacks of the worker's process `pid`, as faulthandler writes them. Raises NoAnswer."""
    channel = target.channel
    if channel is None:
        raise NoAnswer("it is no Python of ours, so it has no place to write them to")
    with channel.held() as is_open:
        if not is_open:
            raise NoAnswer("it has ended")
        try:
            # First: whatever is looked at below is about the process that the signal goes to, or that one has ended.
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise NoAnswer("it has ended") from error
        try:
            place = channel.place()
            if place is None or not channel.is_held_by(pid, place):
                raise NoAnswer("it has no place to write them to: no Python of ours, or not up yet")
            uid = os.geteuid() if target.account is None else target.account.uid
            if user_ids(pid) != {uid}:
                raise NoAnswer(f"it runs as another user than the worker's, {uid}")
            deadline_s = time.monotonic() + within_s
            text = _ask_its_thread(pid, channel, within_s) if pid == target.pid else None
            return _ask(pid, pidfd, place.number, channel, deadline_s) if text is None else text
        finally:
            os.close(pidfd)


def _ask_its_thread(pid: int, channel: StackChannel, within_s: float) -> str | None:
    """Returns the stacks that the process's own thread writes; None if it does not answer in time, or can't: the signal
    may find out why."""
    status = process_status(pid)
    if status is None or status.is_stopped:
        return None
    written = channel.written_bytes()
    if not channel.ask():
        return None
    until_s = time.monotonic() + min(within_s / 2, THREAD_ANSWERS_WITHIN_S)
    while time.monotonic() < until_s:
        *whole, _ = channel.answer(written).split(WHOLE)
        stacks = [answer for answer in whole if not answer.startswith(COLLECTIVES_HEAD)]
        if stacks:
            return WHOLE.join(stacks)
        time.sleep(LOOK_AGAIN_S)  # the kernel does not report that a file has grown, so this polls
    return None


def _ask(pid: int, pidfd: int, number: int, channel: StackChannel, deadline_s: float) -> str:
    status, before = process_status(pid), signal_status(pid, number)
    if status is None or before is None:
        raise NoAnswer("it has ended")
    if status.is_stopped:
        raise NoAnswer(f"it is stopped (state {status.state}) and can't answer; SIGCONT would let it go on")
    if not before.caught:
        raise NoAnswer(f"it no longer catches signal {number}, which would kill it")
    written = channel.written_bytes()
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError as error:
        raise NoAnswer(f"it could not be asked: {error.strerror}") from error
    while True:
        # The text first: once there is some, a handler runs, and its thread shows until it returns.
        text = channel.answer(written)
        now = signal_status(pid, number)
        if now is None:
            raise NoAnswer("it ended meanwhile", text)
        if text and _is_answered(before, now):
            return channel.answer(written)
        if time.monotonic() >= deadline_s:
            raise NoAnswer(_why_late(pid, before, now, text), text)
        time.sleep(LOOK_AGAIN_S)  # the kernel does not report when a handler is done, so this polls


def _is_answered(before: SignalStatus, now: SignalStatus) -> bool:
    """Tells whether a thread has taken the signal and its handler has returned: the kernel blocks the signal while it
    runs."""
    return not now.pending and not (now.blocked_in - before.blocked_in)


def _why_late(pid: int, before: SignalStatus, now: SignalStatus, text: str) -> str:
    status = process_status(pid)
    state = f" (state {status.state})" if status is not None else ""
    if text:
        return f"it was still writing them when time was up{state}"
    if now.pending:
        blocked = ", which it blocks" if before.blocked_in else ""
        return f"it did not take the signal{blocked}{state}"
    return f"it wrote nothing{state}"


# -- the file


def _save(target: StackTarget, why: str, within_s: float, tool: str | None) -> SavedStacks:
    text, problem = _text_of(target, why, within_s, tool)
    try:
        path = _write(target.directory, text, target.account)
        return SavedStacks(target.worker_id, path, problem)
    except OSError as error:
        lost = f"{target.directory} can't be written: {error.strerror}"
        return SavedStacks(target.worker_id, None, f"{problem}; {lost}" if problem else lost)


def _text_of(target: StackTarget, why: str, within_s: float, tool: str | None) -> tuple[str, str]:
    """Returns the text of a worker's stacks, and the problem of its own Python stacks. tool: py-spy; None: without
    native stacks."""
    deadline_s = time.monotonic() + within_s
    pids = processes_of(target.pid)
    problem = ""
    parts = [_head(target, why)]
    room = LARGEST_FILE_BYTES
    left_out = len(pids)
    for pid in pids[: 1 + MOST_CHILDREN]:
        if room <= 0:
            break
        text, missing = _section(target, pid, deadline_s)
        if pid == target.pid:
            problem = missing
            if tool is not None:
                text += "\n" + _native(tool, pid, target.account)
        parts.append(text)
        room -= len(text)
        left_out -= 1
    if left_out:
        parts.append(f"{left_out} more processes of this worker are not shown\n")
    return "\n".join(parts), problem


def _head(target: StackTarget, why: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"stacks of worker {target.worker_id}, process {target.pid}, {when}\nsaved because: {why}\n"


def _section(target: StackTarget, pid: int, deadline_s: float) -> tuple[str, str]:
    """Returns everything about one process, and why its Python stacks are not whole."""
    status = process_status(pid)
    if status is None:
        return f"== process {pid} has ended\n", "it has ended"
    lines = list(_describe(status))
    missing = ""
    try:
        python = stacks_of(target, pid, min(ANSWER_WITHIN_S, max(0.0, deadline_s - time.monotonic())))
    except NoAnswer as error:
        missing, python = str(error), error.partial
        lines.append(f"-- no complete Python stacks: {missing}")
    if python:
        lines += ["-- Python stacks", python.rstrip()]
    return "\n".join(lines) + "\n", missing


def _describe(status: ProcessStatus) -> Iterator[str]:
    yield f"== process {status.pid}, parent {status.parent_pid}: {status.command}"
    yield f"-- {len(status.threads)} threads, {status.cpu_s:.2f} s of CPU time, state {status.state or '?'}"
    for t in status.threads:
        yield f"   {t.tid:>8} {t.state}  cpu {t.cpu_s:>9.2f} s  {t.wchan or '-':<28} {t.name}"
    for t in status.threads:
        if t.kernel_stack:
            yield f"-- kernel stack of {t.tid} ({t.name})"
            yield from (f"   {line}" for line in t.kernel_stack.splitlines())


def _native(tool: str, pid: int, account: Account | None) -> str:
    """Returns the stacks that py-spy sees, with frames of C and C++. It needs rights that an agent may not have.

    It runs under the worker's account, for it opens files that the worker's memory map names.
    """
    command = [tool, "dump", "--native", "--pid", str(pid)]
    try:
        done = run_bounded(command, NATIVE_WITHIN_S, account)
    except (OSError, TimeoutError) as error:
        return f"-- no native stacks: {error}\n"
    if done.returncode != 0:
        last = done.output.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"-- no native stacks: py-spy: {last[0]}\n"
    return f"-- native stacks, by py-spy\n{done.output.rstrip()}\n"


def _write(directory: Path, text: str, account: Account | None) -> Path:
    _make_room(directory)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    for suffix in ("", *(f"-{n}" for n in range(2, FILES_KEPT + 2))):
        path = directory / f"stacks-{stamp}Z{suffix}.txt"
        try:
            descriptor = open_file(path, account, new=True)
        except FileExistsError:
            continue
        with os.fdopen(descriptor, "w", errors="replace") as file:
            file.write(text)
        return path
    raise FileExistsError(17, "too many stack files of one second")


def _make_room(directory: Path) -> None:
    """Removes older files but for the first, which shows how it began, and the newest."""
    files = sorted(directory.glob("stacks-*.txt"), key=lambda path: path.lstat().st_mtime)
    for path in files[1 : max(1, len(files) - FILES_KEPT + 2)]:
        path.unlink(missing_ok=True)
