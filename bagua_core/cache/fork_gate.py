"""Keeps a fork from happening while another thread is inside a library call.

What such a call holds, a lock above all, stays held in the child for ever: its thread does not exist there. py-lmdb's
Environment.close() then waits without end. A fork therefore waits until no thread is inside, and no thread enters
meanwhile. Calls must not be nested.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# A call that takes longer than that is stuck, and a fork is better late than never.
_LONGEST_WAIT_S = 10.0


class ForkGate:
    """Admits library calls of any thread, but none during a fork.

    in_child: called in a forked child before anything else of the gate's user.
    """

    def __init__(self, in_child: Callable[[], None]) -> None:
        self._inside = 0
        self._is_closed = False  # a fork waits, or is under way
        self._changed = threading.Condition(threading.Lock())
        self._in_child = in_child
        os.register_at_fork(before=self._before, after_in_parent=self._after, after_in_child=self._begin_anew)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Marks a library call of this thread as under way; waits first while a fork is."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def _before(self) -> None:
        self._changed.acquire()
        self._is_closed = True
        self._changed.wait_for(lambda: not self._inside, _LONGEST_WAIT_S)

    def _after(self) -> None:
        self._is_closed = False
        self._changed.notify_all()
        self._changed.release()

    def _begin_anew(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._is_closed = False
        self._in_child()
