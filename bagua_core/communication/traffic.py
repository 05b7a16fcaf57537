"""Counts the bytes that this process hands to Gloo and NCCL and receives of the state, for its reports to the agent.

Counters of the process, since collectives start in several threads and communicators come and go; they never decrease.
What Bagua-Net counts apart from this is what NCCL sent to other hosts through it.
"""

from __future__ import annotations

import threading


class Counter:
    """A counter of bytes. Any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    @property
    def total_bytes(self) -> int:
        return self._bytes


class Copies(Counter):
    """A counter of the bytes and seconds of received copies of the state. seconds: from the first byte of each copy to
    its last, whatever the script did meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = 0.0

    def received(self, count: int, seconds: float) -> None:
        self.add(count)
        with self._lock:
            self._seconds += seconds

    @property
    def total_s(self) -> float:
        return self._seconds


# Payload as it is sent, so compressed where it is; once, however many ranks receive it
to_collectives = Counter()
copied = Copies()
# Piece by piece, in copies under way and from checkpoints: tells whether one goes on
state_arrived = Counter()
