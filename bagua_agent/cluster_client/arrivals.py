"""A bounded queue between the threads that read streams from daemons and the one that shows them.

A thread that finds the queue full waits, so it reads no more from its call, and the flow control of gRPC slows the
daemon down. Memory therefore grows with the number of the nodes, not with their speed.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")

MOST_ITEMS = 16


class Arrivals(Generic[S, T]):
    """A queue of items in the order of their arrival, each with its source. Thread-safe. most: items that are held."""

    def __init__(self, most: int = MOST_ITEMS) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._items: deque[tuple[S, T]] = deque()
        self._held: Counter[S] = Counter()  # in the queue, or waiting for room in it
        self._closed = False

    def put(self, source: S, item: T) -> None:
        """Adds an item; waits for room. After `close` the item is dropped."""
        with self._changed:
            self._held[source] += 1
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._most)
            if not self._closed:
                self._items.append((source, item))
                self._changed.notify_all()

    def get(self, timeout_s: float) -> tuple[S, T]:
        """Returns the next item and its source. Raises queue.Empty if none comes in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._items), timeout_s):
                raise queue.Empty
            source, item = self._items.popleft()
            self._held[source] -= 1
            self._changed.notify_all()
        return source, item

    def holds(self, source: S) -> bool:
        """Tells whether something of the source has arrived that `get` has not given yet."""
        with self._changed:
            return self._held[source] > 0

    def close(self) -> None:
        """Releases all that wait in `put`; what is here, and what comes yet, is dropped."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
