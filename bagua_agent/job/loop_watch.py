"""Watches whether the agent's loop goes on: one thread that counts the ticks of a clock between two turns of the loop.

A turn that waits for a file system or a driver which does not answer may take hours; the agent's other threads go on
meanwhile, renew its lease and answer probes. An agent in this state carries nothing out, so it must neither lead nor
count as alive. Ticks are counted, and no time is compared: while the process is frozen or the machine stalls, this
thread does not run either, and no loop seems stuck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from bagua_agent.base.background import Failed, OperationEnd, background_thread

TICK_S = 1.0  # as often as an idle loop turns
# The longest wait of a turn is for a fork by a warm parent that does not answer: 10 s (warm_parent.py).
STUCK_AFTER_S = 20.0
_STUCK_TICKS = round(STUCK_AFTER_S / TICK_S)
_THREAD_ENDS_S = 5.0


def stuck_line(*, alone: bool) -> str:
    """Returns the line for the terminal. alone: the job has no other node."""
    waited = f"this agent's loop has waited for {STUCK_AFTER_S:g} s or more, as for a file system that does not answer"
    if alone:
        return f"{waited}: the job starts no worker and forms no generation until it goes on"
    return f"{waited}: the others may go on without this node until it does"


class LoopWatch:
    """Tells other threads whether the loop is stuck, between `start` and `stop`."""

    def __init__(self, tick_s: float = TICK_S) -> None:
        self._tick_s = tick_s
        self._turns = 0  # written by the loop alone
        self._turns_seen = 0  # this and what follows by the watch alone
        self._ticks = 0  # since the last turn
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def turned(self) -> None:
        """Notes a turn of the loop."""
        self._turns += 1

    @property
    def is_stuck(self) -> bool:
        """Whether the loop has not turned for STUCK_AFTER_S. May be asked from any thread."""
        return self._ticks >= _STUCK_TICKS and self._turns == self._turns_seen

    def tick(self) -> bool:
        """Counts a tick. Returns whether the loop has become stuck with it, or has been for another STUCK_AFTER_S."""
        turns = self._turns
        self._ticks = self._ticks + 1 if turns == self._turns_seen else 0
        self._turns_seen = turns
        return self._ticks > 0 and self._ticks % _STUCK_TICKS == 0

    def start(
        self, on_stuck: Callable[[bool], object], on_failed: Callable[[Failed], object] = lambda failed: None
    ) -> None:
        """Starts the thread. on_stuck(is_first): called from it whenever `tick` returns true; is_first: for the first
        time since the last turn. on_failed: called from the thread if it has failed or on_stuck has raised; the loop is
        watched no more."""

        def run() -> None:
            while not self._stopping.wait(self._tick_s):
                if self.tick():
                    on_stuck(self._ticks == _STUCK_TICKS)

        def ended(end: OperationEnd[None]) -> None:
            if isinstance(end, Failed):
                on_failed(end)

        self._thread = background_thread("bagua-loop-watch", run, ended)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; the loop is not stuck from now on."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_THREAD_ENDS_S)
        self._ticks = 0
