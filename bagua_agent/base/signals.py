"""Turns signals into messages, and puts the old handlers back afterwards.

A handler in Python runs in the main thread, between two of its instructions. A signal that arrives while that thread
enters a wait, after its last check for signals, is not handled before the wait is over; this happens in practice when
other threads keep the interpreter busy. So no handler does anything here: the interpreter writes each signal's number
into a pipe as soon as the signal arrives, and a thread of ours reads it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType, TracebackType
from typing import Any

from bagua_agent.base.background import Failed, OperationEnd, background_thread, perform
from bagua_agent.base.errors import InternalError, UserError

log = logging.getLogger(__name__)

_END_TIMEOUT_S = 5.0


class SignalsToInbox:
    """Turns signals into calls: within the block, each of `names` calls `tell` with its number, in a thread of its own,
    which must not wait. To be entered and left in the main thread.

    first: the first signal that came, for what runs before messages are read.
    """

    def __init__(self, names: Sequence[str], tell: Callable[[int], None]) -> None:
        self._numbers = [_number(name) for name in names]
        self._tell = tell
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._read_end = self._write_end = -1
        self._thread = background_thread("signals", self._listen, self._ended)
        self._came = threading.Event()
        self.first: int | None = None

    def wait(self, timeout_s: float) -> None:
        """Waits until the first signal, at most timeout_s."""
        self._came.wait(timeout_s)

    def __enter__(self) -> SignalsToInbox:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._thread.start()
        for number in self._numbers:
            self._before[number] = signal.signal(number, _only_be_there)
        return self

    def _listen(self) -> None:
        while came := os.read(self._read_end, 1):  # until the other end is closed
            number = came[0]
            if number in self._numbers:  # of others the interpreter tells us too
                if self.first is None:
                    self.first = number
                    self._came.set()
                perform(f"taking signal {number}", partial(self._tell, number), self._ended)

    def _ended(self, end: OperationEnd[object]) -> None:
        if isinstance(end, Failed):
            log.error("a signal may have had no effect: %s; send it again, or SIGKILL", end.reason)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._write_end)
        self._thread.join(_END_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError("the thread that hears signals did not end: what it tells hangs?")
        os.close(self._read_end)


def _only_be_there(number: int, frame: FrameType | None) -> None:
    """Does nothing. Without a handler the signal would do what it does by default."""


def _number(name: str) -> int:
    try:
        return signal.Signals[name.strip().upper()].value
    except KeyError:
        raise UserError(
            f"--signals-to-handle names {name!r}, which is no signal here; use names such as SIGTERM,SIGINT"
        ) from None
