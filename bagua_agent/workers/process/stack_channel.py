"""The channel through which a worker is asked for its stacks and collectives, as the agent holds it.

The agent makes both ends and passes the worker's at its start (bagua_core/worker/stack_dump.py takes them), so that an
agent with more rights than its workers never opens anything that a worker names. What comes through it is a worker's
word and nothing more: bounded, parsed, and worth no more than a line in a file.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

DESCRIPTORS_VARIABLE = "BAGUA_STACK_FDS"  # also in bagua_core/worker/stack_dump.py and forked_identity.py
WHOLE = "\n-- whole\n"  # also in bagua_core/worker/stack_dump.py
STACKS, COLLECTIVES = b"?", b"c"  # requests to the worker's thread: also there
COLLECTIVES_HEAD = "-- collectives\n"  # begins an answer: also there
LARGEST_ANSWER_BYTES = 1 << 20  # faulthandler shows 100 threads with 100 frames each at most
_FIRST_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ChannelPlace:
    """A worker's statement about its end of the channel. number: the signal that asks for stacks. descriptor: of the
    file."""

    number: int
    descriptor: int


class StackChannel:
    """The channel of one worker. Any thread may call. The descriptors stay open while a thread is inside `held`, also
    after `close`."""

    def __init__(self) -> None:
        self._name = f"bagua-stacks-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._holders = 0
        self._closed = False
        self._answers = os.memfd_create(self._name, os.MFD_CLOEXEC)
        try:
            # A worker's children share the offset; appending keeps their answers apart all the same.
            fcntl.fcntl(self._answers, fcntl.F_SETFL, os.O_APPEND)
            self._workers_end, self._requests = os.pipe2(os.O_CLOEXEC)
        except BaseException:
            os.close(self._answers)
            raise
        os.set_blocking(self._requests, False)

    @property
    def workers_ends(self) -> tuple[int, int]:
        """The descriptors for the new process, in the order of BAGUA_STACK_FDS."""
        return self._answers, self._workers_end

    def passed(self) -> None:
        """Closes the worker's end here: the new process has its ends, or there will be none."""
        os.close(self._workers_end)

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Keeps the channel open within the block. Yields False if it is closed, and nothing may be called."""
        with self._lock:
            is_open = not self._closed
            self._holders += is_open
        try:
            yield is_open
        finally:
            with self._lock:
                self._holders -= is_open
                self._release()

    def place(self) -> ChannelPlace | None:
        """Returns what the worker has said about its end; None until it has said it, and for what no worker of ours
        says."""
        first, end, _ = os.pread(self._answers, _FIRST_LINE_BYTES, 0).partition(b"\n")
        words = first.split(b" ")
        if not end or len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        number, descriptor = map(int, words)
        # Others than real-time signals may mean something to the process, whose parent may have chosen the number.
        return ChannelPlace(number, descriptor) if signal.SIGRTMIN < number <= signal.SIGRTMAX else None

    def is_held_by(self, pid: int, place: ChannelPlace) -> bool:
        """Tells whether the process has this channel where the worker said, as forked children do. Reads the name
        only."""
        try:
            target = os.readlink(Path("/proc", str(pid), "fd", str(place.descriptor)))
        except OSError:
            return False  # closed, ended, or another user's
        return target == f"/memfd:{self._name} (deleted)"

    def written_bytes(self) -> int:
        return os.fstat(self._answers).st_size

    def ask(self, what: bytes = STACKS) -> bool:
        """Asks the worker's thread. Returns False if the worker no longer reads, or never did."""
        try:
            os.write(self._requests, what)
        except OSError:
            return False
        return True

    def answer(self, from_byte: int) -> str:
        """Returns what was written since `from_byte`, LARGEST_ANSWER_BYTES of it at most: the worker decides how large
        its file is."""
        wanted = min(LARGEST_ANSWER_BYTES, max(0, self.written_bytes() - from_byte))
        return os.pread(self._answers, wanted, from_byte).decode(errors="replace")

    def close(self) -> None:
        """Closes the channel. May be called twice."""
        with self._lock:
            self._closed = True
            self._release()

    def _release(self) -> None:
        if self._closed and not self._holders and self._answers >= 0:
            os.close(self._answers)
            os.close(self._requests)
            self._answers = self._requests = -1
