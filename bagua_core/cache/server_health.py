"""Decides when a server that failed is tried again, so that a lost server costs only an occasional try. Pure."""

from __future__ import annotations

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class ServerHealth:
    """Time is an argument: seconds of a clock that does not jump."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._ask_from_s = 0.0

    @property
    def is_lost(self) -> bool:
        return self._pause_s > 0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._ask_from_s

    def failed(self, now_s: float) -> None:
        """Pauses double: 1 s, 2 s, ... LONGEST_PAUSE_S."""
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._ask_from_s = now_s + self._pause_s

    def answered(self) -> bool:
        """Returns whether it was lost before."""
        was_lost, self._pause_s, self._ask_from_s = self.is_lost, 0.0, 0.0
        return was_lost
