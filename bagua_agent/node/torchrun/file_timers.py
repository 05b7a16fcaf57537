"""Serves torch.distributed.elastic.timer: workers set deadlines, and one that misses its deadline is signalled.

The agent's side of torch's FileTimerClient, on if TORCHELASTIC_ENABLE_FILE_TIMER is 1. Requests are lines of JSON in a
FIFO whose path workers find in TORCHELASTIC_TIMER_FILE. Requests of workers are not trusted: no process outside the
sessions of this node's workers is ever signalled.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import signal
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.background import Failed, background_thread
from bagua_agent.base.errors import UserError
from bagua_agent.base.readable import readable
from bagua_agent.rpc.message_pace import LineBudget

log = logging.getLogger(__name__)

ENABLE_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"
FILE_VARIABLE = "TORCHELASTIC_TIMER_FILE"
MOST_TIMERS = 10_000
MOST_COMPLAINTS = 20  # at once; then one a second, for a worker can write faster than anybody reads
STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Timer:
    """One deadline of a worker. expires_at_s: by the host's clock, as time.time() gives it. signal: 0 for none."""

    pid: int
    scope: str
    expires_at_s: float
    signal: int


def parse_request(line: bytes) -> Timer | None:
    """Parses one request; returns None for what torch's client does not write. A negative time releases the timer."""
    try:
        values = json.loads(line)
        timer = Timer(
            int(values["pid"]),
            str(values["scope_id"]),
            float(values["expiration_time"]),
            int(values["signal"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    usable = timer.pid > 1 and 0 <= timer.signal <= signal.SIGRTMAX and math.isfinite(timer.expires_at_s)
    return timer if usable else None


def timer_file(environ: Mapping[str, str], directory: Path) -> Path | None:
    """Returns the path at which requests are read; None if timers are not asked for."""
    if environ.get(ENABLE_VARIABLE) != "1":
        return None
    return Path(environ.get(FILE_VARIABLE) or directory / "timers")


class FileTimers:
    """Reads requests from the FIFO and signals processes whose timers expire. signal_process(pid, number): tells
    whether that is a process of a worker here, and was signalled."""

    def __init__(self, path: Path, signal_process: Callable[[int, int], bool]) -> None:
        """Makes the FIFO at `path`. Raises UserError if none can be made there."""
        self._path = path
        self._signal_process = signal_process
        self._timers: dict[tuple[int, str], Timer] = {}
        self._unfinished = b""
        self._complaints = LineBudget(burst=MOST_COMPLAINTS)
        try:
            if path.exists() and stat.S_ISFIFO(path.stat().st_mode):
                path.unlink()  # of a run before
            os.mkfifo(path, 0o600)
            # for writing too: so there is never an end-of-file when the last client closes
            self._fifo = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as problem:
            raise UserError(
                f"timers can't be served at {path}: {problem.strerror}; check {FILE_VARIABLE}"
            ) from problem
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = background_thread("file-timers", self._run, self._ended)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._path.unlink(missing_ok=True)
        os.close(self._fifo)
        os.close(self._stop_fd)

    def _ended(self, end: object) -> None:
        if isinstance(end, Failed):
            log.warning("timers of workers are not looked after any more: %s", end.reason)

    def _run(self) -> None:
        while True:
            next_s = min((t.expires_at_s for t in self._timers.values()), default=None)
            # at most a second: the host's clock may be set meanwhile
            wait_s = None if next_s is None else min(1.0, max(0.0, next_s - time.time()))
            ready = readable([self._fifo, self._stop_fd], wait_s)
            if self._stop_fd in ready:
                return
            if self._fifo in ready:
                self._read()
            self._expire(time.time())

    def _read(self) -> None:
        *lines, self._unfinished = (self._unfinished + os.read(self._fifo, 65536)).split(b"\n")
        self._unfinished = self._unfinished[: select.PIPE_BUF]  # a longer line is no request
        for line in lines:
            timer = parse_request(line)
            if timer is None:
                self._complain()
            elif timer.expires_at_s < 0:
                self._timers.pop((timer.pid, timer.scope), None)
            elif len(self._timers) < MOST_TIMERS:
                self._timers[timer.pid, timer.scope] = timer

    def _complain(self) -> None:
        left_out = self._complaints.take(time.monotonic())
        if left_out is not None:
            more = f" ({left_out} more were left out)" if left_out else ""
            log.warning("a line in %s is no request of a timer and is ignored%s", self._path, more)

    def _expire(self, now_s: float) -> None:
        expired = sorted(
            (t for t in self._timers.values() if t.expires_at_s <= now_s), key=lambda t: t.expires_at_s
        )
        for pid in dict.fromkeys(t.pid for t in expired):
            timer = next((t for t in expired if t.pid == pid and t.signal), None)
            for key in [key for key in self._timers if key[0] == pid]:
                del self._timers[key]
            if timer is not None and self._signal_process(pid, timer.signal):
                log.warning(
                    "timer %r of worker process %d has expired; it gets signal %d",
                    timer.scope,
                    pid,
                    timer.signal,
                )
