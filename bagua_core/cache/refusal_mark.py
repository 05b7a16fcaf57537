"""Decides which frames a full store is still asked to take. Time is an argument: seconds of a clock that does not jump.

A frame that was refused is larger than the room there is, and so are all others of its size: trying each of them costs
a lock and a transaction. Room comes back when entries are removed, which their number shows, or for other reasons,
which a new try shows. The room of removed entries comes back once the reads under way have ended, so a store that has
had more entries is tried again soon.
"""

from __future__ import annotations

RETRY_AFTER_S = 30.0
RETRY_AFTER_REMOVAL_S = 1.0


class RefusalMark:
    def __init__(self) -> None:
        self._least_bytes: int | None = None  # of the frames that were refused
        self._is_closed = False  # frames of this size and more are not tried
        self._entries = 0  # of the store at the newest refusal
        self._most_entries = 0  # of the store at any refusal
        self._retry_from_s = 0.0

    def admits(self, size_bytes: int) -> bool:
        return not self._is_closed or self._least_bytes is None or size_bytes < self._least_bytes

    def look(self, entries: int, now_s: float) -> None:
        """Admits all frames again if there may be room. entries: of the store now."""
        if entries < self._entries or now_s >= self._retry_from_s:
            self._is_closed = False

    def refused(self, size_bytes: int, entries: int, now_s: float, *, closes: bool) -> None:
        """Notes that a frame of this size was refused. closes: frames as large are not tried for a while."""
        self._least_bytes = size_bytes if self._least_bytes is None else min(self._least_bytes, size_bytes)
        if closes:
            after_removal = entries < self._most_entries or not entries
            self._most_entries = max(self._most_entries, entries)
            self._is_closed, self._entries = True, entries
            self._retry_from_s = now_s + (RETRY_AFTER_REMOVAL_S if after_removal else RETRY_AFTER_S)

    def stored(self, size_bytes: int) -> bool:
        """Notes that a frame of this size was stored. Returns whether such a frame was refused before."""
        if self._least_bytes is None or size_bytes < self._least_bytes:
            return False
        self.forget()
        return True

    def forget(self) -> None:
        """Forgets all refusals, as after the store was cleared."""
        self._least_bytes, self._is_closed = None, False
