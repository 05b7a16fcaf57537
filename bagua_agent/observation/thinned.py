"""Keeps a bounded past: the newest half complete, and of what is older every n-th, the first included. Pure.

n is a power of two. It doubles when the older half is full, so the older items stay at equal distances.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Thinned(Generic[T]):
    """A past of at most `most` items."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._older: list[T] = []
        self._stride = 1
        self._left = 0  # items that have left the newest ones
        self._newest: deque[T] = deque()

    @property
    def newest(self) -> T | None:
        return self._newest[-1] if self._newest else None

    def items(self) -> list[T]:
        """Returns what is kept, the oldest first."""
        return [*self._older, *self._newest]

    def append(self, item: T) -> None:
        self._newest.append(item)
        if len(self._newest) <= self._half:
            return
        oldest = self._newest.popleft()
        if self._left % self._stride == 0:
            self._older.append(oldest)
            if len(self._older) == self._half:
                self._older = self._older[::2]
                self._stride *= 2
        self._left += 1
