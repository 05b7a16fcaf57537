"""Named timers of one loop; setting one again replaces it."""

from __future__ import annotations

import threading
from collections.abc import Callable

Due = Callable[[float], object]


class Timers:
    """The timers of one loop. wake(): makes the loop look again; for timers that other threads set."""

    def __init__(self, wake: Callable[[], object] = lambda: None) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._timers: dict[str, tuple[float, Due]] = {}

    def set(self, name: str, at_s: float, due: Due) -> None:
        """Sets a timer: due(now_s) is called once from the loop, at at_s or soon after."""
        with self._lock:
            self._timers[name] = (at_s, due)

    def set_once(self, name: str, at_s: float, due: Due) -> None:
        """Sets a timer as `set` does, but a timer of that name that is set already keeps its time."""
        with self._lock:
            self._timers.setdefault(name, (at_s, due))

    def cancel(self, name: str) -> None:
        with self._lock:
            self._timers.pop(name, None)

    def set_from_thread(self, name: str, at_s: float, due: Due) -> None:
        """Sets a timer as `set` does, from another thread than the loop's."""
        self.set(name, at_s, due)
        self._wake()

    def next_in_s(self, now_s: float) -> float:
        with self._lock:
            first_s = min((at_s for at_s, _ in self._timers.values()), default=float("inf"))
        return max(0.0, first_s - now_s)

    def take_due(self, now_s: float) -> list[Due]:
        with self._lock:
            names = [name for name, (at_s, _) in self._timers.items() if at_s <= now_s]
            return [self._timers.pop(name)[1] for name in names]
