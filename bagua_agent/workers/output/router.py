"""Carries what workers print to terminal and files: one thread for all pipes.

Owns the read ends of the workers' pipes, the log files and the tail of each worker's stderr. A stream
whose terminal is full is not read, so a flooding worker waits in its own write and the agent's memory
stays bounded. Which stream goes where is decided in output_options.py.
"""

from __future__ import annotations

import fcntl
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.errors import BaguaError
from bagua_agent.base.plain_text import plain_lines
from bagua_agent.workers.output.earlier_logs import EarlierLogs
from bagua_agent.workers.output.log_file import LogFile
from bagua_agent.workers.output.log_layout import LogLayout
from bagua_agent.workers.output.output_options import OutputOptions, StreamPlan, Streams
from bagua_agent.workers.output.recent_output import RecentOutput
from bagua_agent.workers.output.stream_lines import LineCutter, Segment, Tail
from bagua_agent.workers.output.terminal import Terminal, open_terminals
from bagua_agent.workers.process.worker_process import WorkerProcess

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
PARTIAL_LINE_S = 0.3  # a prompt or progress bar is shown after this time
STOP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Stream:
    worker_id: str
    fd: int
    plan: StreamPlan
    tag: bytes  # of lines in filtered files
    prefix: bytes  # of lines on the terminal
    whole_lines: bool  # else bytes are passed on as they come
    terminal: Terminal
    file: LogFile | None
    filtered: LogFile | None
    tail: Tail | None
    cutter: LineCutter
    slot: int
    stream: Streams
    partial_since: float | None = None
    reading: bool = False

    @property
    def owner(self) -> tuple[str, int]:
        return self.worker_id, self.fd


class OutputRouter:
    """Routes the output of this node's workers. `attach` a worker after spawning it; `finish` it after it was reaped.
    Any thread may call.

    several: more than one worker writes to the terminal, so lines are kept whole.
    """

    def __init__(
        self,
        options: OutputOptions,
        layout: LogLayout,
        *,
        several: bool = False,
        out_fd: int = 1,
        err_fd: int = 2,
        max_log_bytes: int = 0,
        on_failed: Callable[[Failed], object] = lambda failed: None,
    ) -> None:
        """Opens the terminals; `start` starts the thread. max_log_bytes: of each file, as in LogFile. on_failed: called
        once if the thread ends by an error; nothing is read or printed from then on."""
        self._on_failed = on_failed
        self._options = options
        self._layout = layout
        self._max_log_bytes = max_log_bytes
        self._earlier = EarlierLogs(max_log_bytes)
        self._several = several
        self._out, self._err = open_terminals(out_fd, err_fd)
        self._terminals = (self._out,) if self._out is self._err else (self._out, self._err)
        self.recent = RecentOutput()
        self._filtered: dict[Streams, LogFile] = {}
        self._streams: dict[int, _Stream] = {}
        self._tails: dict[str, Tail] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._selector = selectors.PollSelector()  # poll takes regular files too, unlike epoll
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._stop_deadline: float | None = None
        self._thread = background_thread("worker-output", self._run, self._ended)

    def start(self) -> None:
        """Opens the files for filtered lines and starts the thread. Raises UserError when such a file cannot be
        made."""
        wanted = (
            (Streams.OUT, self._options.stdout_filters, self._layout.filtered_stdout),
            (Streams.ERR, self._options.stderr_filters, self._layout.filtered_stderr),
        )
        for stream, filters, path in wanted:
            if filters:
                self._layout.make_node_directory()
                self._filtered[stream] = LogFile(path, self._layout.account, self._max_log_bytes)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._thread.start()

    def inherited(self, slot: int, stream: Streams) -> int | None:
        """Returns the agent's own descriptor, if it is a terminal that the worker writes to itself; None: a pipe is
        read.

        Where stdout or stderr is no terminal the difference can't be seen, and the pipe's content explains failures.
        """
        terminal = self._out if stream is Streams.OUT else self._err
        if not terminal.is_tty or not self._options.inherits(slot, stream):
            return None
        terminal.is_shared = True
        return terminal.fd

    def attach(self, worker: WorkerProcess, global_rank: int = -1) -> None:
        """Takes over the worker's pipes. Raises UserError or InfrastructureLost when its log files cannot be made."""
        files = self._layout.make_worker_directory(worker.slot, worker.worker_id)
        self._earlier.begin(worker.slot, files.directory)
        streams: list[_Stream] = []
        try:
            if worker.stdout_fd is not None:
                streams.append(self._stream(worker, worker.stdout_fd, Streams.OUT, files.stdout, global_rank))
            if worker.stderr_fd is not None:
                streams.append(self._stream(worker, worker.stderr_fd, Streams.ERR, files.stderr, global_rank))
        except BaguaError:
            for stream in streams:
                if stream.file is not None:
                    stream.file.close()
            raise
        worker.stdout_fd = worker.stderr_fd = None
        self._do(lambda: self._add(streams))

    def _stream(
        self, worker: WorkerProcess, fd: int, stream: Streams, path: Path, global_rank: int
    ) -> _Stream:
        options, slot = self._options, worker.slot
        plan = options.plan(slot, stream)
        tag = os.fsencode(options.tag(slot, global_rank, self._layout.node_name))
        prefix = tag if options.is_tagged(slot, stream) else b""
        return _Stream(
            worker_id=worker.worker_id,
            fd=fd,
            plan=plan,
            tag=tag,
            prefix=prefix,
            whole_lines=bool(prefix) or self._several,
            terminal=self._out if stream is Streams.OUT else self._err,
            file=LogFile(path, self._layout.account, self._max_log_bytes) if plan.file else None,
            filtered=self._filtered.get(stream),
            tail=Tail() if stream is Streams.ERR else None,
            cutter=LineCutter(),
            slot=slot,
            stream=stream,
        )

    def say(self, line: str) -> None:
        """Prints lines of the agent's own on stderr, in order and not inside a worker's line. They quote what others
        wrote."""
        self._say(line)

    def say_if_open(self, line: str) -> bool:
        """Does as `say`, and returns False if the thread has not started or has ended: nothing is printed then."""
        return self._thread.ident is not None and self._say(line)

    def _say(self, line: str) -> bool:
        return self._do(lambda: self._err.add_line(plain_lines(line).encode()))

    def show_status(self, text: str) -> None:
        """Shows one line on stderr, rewritten in place; nothing if stderr is no terminal."""
        self._do(lambda: self._err.show_status(text.encode()))

    def finish(self, worker_id: str, timeout_s: float = 2.0) -> str:
        """Reads what the ended worker left in its pipes, closes them and returns the tail of its stderr.

        Never waits for a process that still holds the pipe: takes at most what it can contain.
        """
        done = threading.Event()
        result: list[str] = []

        def finish() -> None:
            for stream in [s for s in self._streams.values() if s.worker_id == worker_id]:
                self._drain(stream)
            tail = self._tails.pop(worker_id, None)
            result.append(tail.text() if tail is not None else "")
            done.set()

        self._do(finish)
        if not done.wait(timeout_s):
            log.warning("the output of worker %s was not read to its end in %.1f s", worker_id, timeout_s)
            return ""
        return result[0]

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Writes out everything and closes. Returns False if a reader of the terminal did not take it in time."""
        deadline = time.monotonic() + timeout_s

        def stop() -> None:
            for stream in list(self._streams.values()):
                self._drain(stream)
            self._err.end_status()
            self._stop_deadline = deadline

        if self._thread.ident is None:
            return True  # never started: something else went wrong first, and is what has to be told
        self._do(stop)
        self._thread.join(timeout_s + 1.0)
        return not self._thread.is_alive() and not any(t.wants_write for t in self._terminals)

    # -- everything below runs in the thread

    def _do(self, command: Callable[[], None]) -> bool:
        """Has the thread run `command`. Returns False if the thread has ended."""
        with self._wake_lock:
            if self._wake_fd < 0:
                return False
            self._commands.append(command)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._on_failed(end)

    def _run(self) -> None:
        try:
            while not self._is_done():
                self._update_interest()
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Stream):
                        if key.data.fd in self._streams:  # not finished by a command just now
                            self._read(key.data)
                    elif isinstance(key.data, Terminal):
                        key.data.write_some()
                    else:
                        os.eventfd_read(self._wake_fd)
                        self._run_commands()
                self._flush_partial_lines()
        finally:
            self._close()

    def _run_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _is_done(self) -> bool:
        if self._stop_deadline is None:
            return False
        return not any(t.wants_write for t in self._terminals) or time.monotonic() >= self._stop_deadline

    def _wait_s(self) -> float | None:
        starts = [s.partial_since for s in self._streams.values() if s.partial_since is not None]
        times = [start + PARTIAL_LINE_S for start in starts]
        if self._stop_deadline is not None:
            times.append(self._stop_deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _update_interest(self) -> None:
        watched = self._selector.get_map()
        for terminal in self._terminals:
            if terminal.wants_write and terminal.fd not in watched:
                self._selector.register(terminal.fd, selectors.EVENT_WRITE, terminal)
            elif not terminal.wants_write and terminal.fd in watched:
                self._selector.unregister(terminal.fd)
        for stream in self._streams.values():
            full, room = stream.terminal.is_full, stream.terminal.has_room
            if stream.reading and stream.plan.terminal and full:
                self._selector.unregister(stream.fd)
                stream.reading = False
            elif not stream.reading and (room or not stream.plan.terminal):
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)
                stream.reading = True

    def _add(self, streams: list[_Stream]) -> None:
        for stream in streams:
            self._streams[stream.fd] = stream
            if stream.tail is not None:
                self._tails[stream.worker_id] = stream.tail

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._carry(stream, data)
        else:
            self._end(stream)

    def _drain(self, stream: _Stream) -> None:
        left = fcntl.fcntl(stream.fd, fcntl.F_GETPIPE_SZ)
        while left > 0:
            try:
                data = os.read(stream.fd, left)
            except BlockingIOError:
                break
            if not data:
                break
            self._carry(stream, data)
            left -= len(data)
        self._end(stream)

    def _carry(self, stream: _Stream, data: bytes) -> None:
        self.recent.add(stream.slot, stream.stream, data)
        if stream.file is not None:
            stream.file.write(data)
        raw = stream.plan.terminal and not stream.whole_lines
        if raw:
            stream.terminal.add_raw(stream.owner, data)
        if (stream.plan.terminal and not raw) or stream.tail is not None or stream.filtered is not None:
            self._carry_segments(stream, stream.cutter.feed(data))
            stream.partial_since = time.monotonic() if stream.cutter.has_partial else None

    def _carry_segments(self, stream: _Stream, segments: list[Segment]) -> None:
        for segment in segments:
            if stream.plan.terminal and stream.whole_lines:
                stream.terminal.add_segment(stream.owner, stream.prefix, segment)
            if stream.tail is not None:
                stream.tail.add(segment)
            if stream.filtered is not None and any(f in segment.text for f in stream.plan.filters):
                stream.filtered.write(stream.tag + segment.text + b"\n")

    def _flush_partial_lines(self) -> None:
        now = time.monotonic()
        for stream in self._streams.values():
            if stream.partial_since is not None and now - stream.partial_since >= PARTIAL_LINE_S:
                self._carry_segments(stream, stream.cutter.flush())
                stream.partial_since = None

    def _end(self, stream: _Stream) -> None:
        self.recent.end_line(stream.slot, stream.stream)
        self._carry_segments(stream, stream.cutter.flush(at_end=True))
        if stream.plan.terminal and stream.whole_lines:
            stream.terminal.end_line(stream.owner)
        elif stream.plan.terminal:
            stream.terminal.end_raw(stream.owner)
        if stream.reading:
            self._selector.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)
        if stream.file is not None:
            stream.file.close()

    def _close(self) -> None:
        with self._wake_lock:  # first: from here on _do refuses commands that would never run
            self._selector.unregister(self._wake_fd)
            os.close(self._wake_fd)
            self._wake_fd = -1
        self._run_commands()  # those that came after the last turn of the loop
        for stream in list(self._streams.values()):
            self._end(stream)
        for file in self._filtered.values():
            file.close()
        self._update_interest()
        for key, _ in self._selector.select(0):
            key.data.write_some()  # all that is left are terminals
        self._selector.close()
