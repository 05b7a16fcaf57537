"""Where do a node's workers stand? Saves all threads' stacks beside each worker's logs, before anything is killed.

Asks the worker's own thread for it (bagua_core/stack_dump.py), and where that does not answer, since another one holds
the GIL, by the signal that is answered from C. Adds what /proc says. Owns the asking and the file; why it is asked for
is the caller's affair.
Invariants: bounded, whatever state a worker is in; a process that would die of the signal is never sent it.
Blocks: call it from a thread that may wait.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.workers.process_status import (
    ProcessStatus,
    SignalStatus,
    process_status,
    processes_of,
    signal_status,
)

WITHIN_S = 5.0  # for one worker with its children; workers are asked side by side
ANSWER_WITHIN_S = 2.0  # for one process: an answer takes milliseconds
# Its thread waits for the GIL, which Python hands over every 5 ms: no answer by then is none.
THREAD_ANSWERS_WITHIN_S = 0.5
LOOK_AGAIN_S = 0.005
NATIVE_WITHIN_S = 5.0
MOST_CHILDREN = 32
MOST_AT_ONCE = 16
FILES_KEPT = 10  # a script that saves checkpoints for minutes must not fill a disk with stacks

# both also in bagua_core/stack_dump.py
_CHANNEL = re.compile(r"^/memfd:bagua-stacks-(\d+)-(\d+)-(\d+)")
_WHOLE = "\n-- whole\n"


@dataclass(frozen=True, slots=True)
class StackTarget:
    """A worker. directory: where its logs lie."""

    worker_id: str
    pid: int
    directory: Path


@dataclass(frozen=True, slots=True)
class SavedStacks:
    """path: None if nothing could be written. problem: why the worker's own Python stacks are missing or
    incomplete; empty if they are whole."""

    worker_id: str
    path: Path | None
    problem: str = ""


class NoAnswer(Exception):
    """A process did not write its stacks, or not all of them. partial: what came."""

    def __init__(self, why: str, partial: str = "") -> None:
        super().__init__(why)
        self.partial = partial


def save_stacks(
    targets: Sequence[StackTarget], why: str, *, within_s: float = WITHIN_S, native: bool = True
) -> list[SavedStacks]:
    """Write stacks-<time>.txt for each worker. Takes at most about within_s (plus NATIVE_WITHIN_S with py-spy).

    native: add what py-spy sees, where it is installed. Never raises for a worker's state.
    """
    if not targets:
        return []
    tool = shutil.which("py-spy") if native else None
    with ThreadPoolExecutor(min(len(targets), MOST_AT_ONCE), thread_name_prefix="stacks") as pool:
        return list(pool.map(lambda target: _save(target, why, within_s, tool), targets))


def stacks_of(pid: int, within_s: float = ANSWER_WITHIN_S) -> str:
    """The Python stacks of one process, as faulthandler writes them. Raises NoAnswer."""
    found = _channel_of(pid)
    if found is None:
        raise NoAnswer("it has no place to write them to: no Python of ours, or not up yet")
    link, number, ask_here = found
    try:
        # By pidfd: between looking and sending the number must not pass to another process. Our own opening of the
        # file outlives the process.
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise NoAnswer("it has ended") from error
    try:
        try:
            answer = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NoAnswer(f"its stack file can't be read: {error.strerror}") from error
        try:
            deadline_s = time.monotonic() + within_s
            text = _ask_its_thread(pid, ask_here, answer, within_s) if ask_here is not None else None
            return _ask(pid, pidfd, number, answer, deadline_s) if text is None else text
        finally:
            os.close(answer)
    finally:
        os.close(pidfd)


def _ask_its_thread(pid: int, ask_here: Path, answer: int, within_s: float) -> str | None:
    """None if it does not answer in time, or can't: the signal may find out why."""
    status = process_status(pid)
    if status is None or status.is_stopped:
        return None
    written = os.fstat(answer).st_size
    try:
        request = os.open(ask_here, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None  # closed, or ended
    try:
        os.write(request, b"?")
    except OSError:
        return None  # nobody reads
    finally:
        os.close(request)
    until_s = time.monotonic() + min(within_s / 2, THREAD_ANSWERS_WITHIN_S)
    while time.monotonic() < until_s:
        text = _read_from(answer, written)
        if text.endswith(_WHOLE):
            return text.removesuffix(_WHOLE)
        time.sleep(LOOK_AGAIN_S)  # the kernel tells nobody that a file has grown, so this looks
    return None


def _ask(pid: int, pidfd: int, number: int, answer: int, deadline_s: float) -> str:
    status, before = process_status(pid), signal_status(pid, number)
    if status is None or before is None:
        raise NoAnswer("it has ended")
    if status.is_stopped:
        raise NoAnswer(f"it is stopped (state {status.state}) and can't answer; SIGCONT would let it go on")
    if not before.caught:
        raise NoAnswer(f"it no longer catches signal {number}, which would kill it")
    written = os.fstat(answer).st_size
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError as error:
        raise NoAnswer(f"it could not be asked: {error.strerror}") from error
    while True:
        # The text first: once there is some, a handler runs, and its thread shows until it returns.
        text = _read_from(answer, written)
        now = signal_status(pid, number)
        if now is None:
            raise NoAnswer("it ended meanwhile", text)
        if text and _is_answered(before, now):
            return _read_from(answer, written)
        if time.monotonic() >= deadline_s:
            raise NoAnswer(_why_late(pid, before, now, text), text)
        time.sleep(LOOK_AGAIN_S)  # the kernel tells nobody when a handler is done, so this looks


def _is_answered(before: SignalStatus, now: SignalStatus) -> bool:
    """Taken by a thread, and that thread's handler has returned: the kernel blocks the signal while it runs."""
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


def _channel_of(pid: int) -> tuple[Path, int, Path | None] | None:
    """Path of the descriptor that leads to its stack file, the signal that asks for them, and the pipe that asks its
    thread; None for a forked child, which has none."""
    descriptors = Path(f"/proc/{pid}/fd")
    try:
        links = sorted(descriptors.iterdir(), key=lambda link: int(link.name))
    except OSError:
        return None  # ended, or another user's
    for link in links:
        try:
            match = _CHANNEL.match(os.readlink(link))
        except OSError:
            continue  # closed meanwhile
        if match:
            ask_here = descriptors / match[2] if int(match[3]) == pid else None
            return link, int(match[1]), ask_here
    return None


def _read_from(file: int, offset: int) -> str:
    return os.pread(file, max(0, os.fstat(file).st_size - offset), offset).decode(errors="replace")


# -- the file


def _save(target: StackTarget, why: str, within_s: float, tool: str | None) -> SavedStacks:
    deadline_s = time.monotonic() + within_s
    pids = processes_of(target.pid)
    shown, left_out = pids[: 1 + MOST_CHILDREN], len(pids[1 + MOST_CHILDREN :])
    problem = ""
    parts = [_head(target, why)]
    for pid in shown:
        text, missing = _section(pid, deadline_s)
        parts.append(text)
        if pid == target.pid:
            problem = missing
            if tool is not None:
                parts.append(_native(tool, pid))
    if left_out:
        parts.append(f"{left_out} more processes of this worker are not shown\n")
    try:
        return SavedStacks(target.worker_id, _write(target.directory, "\n".join(parts)), problem)
    except OSError as error:
        lost = f"{target.directory} can't be written: {error.strerror}"
        return SavedStacks(target.worker_id, None, f"{problem}; {lost}" if problem else lost)


def _head(target: StackTarget, why: str) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"stacks of worker {target.worker_id}, process {target.pid}, {when}\nsaved because: {why}\n"


def _section(pid: int, deadline_s: float) -> tuple[str, str]:
    """Everything about one process, and why its Python stacks are not whole."""
    status = process_status(pid)
    if status is None:
        return f"== process {pid} has ended\n", "it has ended"
    lines = list(_describe(status))
    missing = ""
    try:
        python = stacks_of(pid, min(ANSWER_WITHIN_S, max(0.0, deadline_s - time.monotonic())))
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


def _native(tool: str, pid: int) -> str:
    """What py-spy sees, with frames of C and C++. It needs rights that an agent may not have."""
    command = [tool, "dump", "--native", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=NATIVE_WITHIN_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"-- no native stacks: {error}\n"
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return f"-- no native stacks: py-spy: {last[0]}\n"
    return f"-- native stacks, by py-spy\n{done.stdout.rstrip()}\n"


def _write(directory: Path, text: str) -> Path:
    _make_room(directory)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    for suffix in ("", *(f"-{n}" for n in range(2, FILES_KEPT + 2))):
        path = directory / f"stacks-{stamp}Z{suffix}.txt"
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            continue
        return path
    raise FileExistsError(17, "too many stack files of one second")


def _make_room(directory: Path) -> None:
    """Keep the first, which shows how it began, and the newest."""
    files = sorted(directory.glob("stacks-*.txt"), key=lambda path: path.stat().st_mtime)
    for path in files[1 : max(1, len(files) - FILES_KEPT + 2)]:
        path.unlink(missing_ok=True)
