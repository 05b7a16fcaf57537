"""Limits how fast a worker's messages are read, and how much is printed because of them. Pure.

A worker's messages go into the agent's memory, and some of them into etcd, which all jobs share and which keeps every
version for a while. A worker that floods its agent is read more slowly: its own stream fills up, and nothing else
waits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

_OVERHEAD_BYTES = 100  # of a message, and of a record


@dataclass(slots=True)
class BytesBudget:
    """A budget of bytes that refills with time. burst_bytes: what may be used at once. bytes_per_s: what comes
    again."""

    burst_bytes: float
    bytes_per_s: float
    _used_bytes: float = 0.0
    _at_s: float = float("-inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Uses the budget and returns how long to wait before anything more is taken, in seconds."""
        if self._at_s > float("-inf"):
            self._used_bytes = max(0.0, self._used_bytes - (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s
        self._used_bytes += size_bytes + _OVERHEAD_BYTES
        return max(0.0, (self._used_bytes - self.burst_bytes) / self.bytes_per_s)


def etcd_budget() -> BytesBudget:
    """Makes the budget of what is written to etcd on behalf of one slot."""
    return BytesBudget(burst_bytes=1 << 20, bytes_per_s=4 << 10)


@dataclass(slots=True)
class LineBudget:
    """Limits the lines that the agent prints because of what workers say: a burst, then one each second."""

    burst: int = 200
    lines_per_s: float = 1.0
    _left_out: int = 0
    _used: float = 0.0
    _at_s: float = 0.0

    def take(self, now_s: float) -> int | None:
        """Uses the budget for one line and returns how many were left out before it; None: this one is left out too."""
        self._used = max(0.0, self._used - max(0.0, now_s - self._at_s) * self.lines_per_s)
        self._at_s = now_s
        if self._used + 1 > self.burst:
            self._left_out += 1
            return None
        self._used += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


@dataclass(slots=True)
class MessagePace:
    """Limits the messages of one slot: of all sessions of all its workers, so that no new session brings a new budget.
    A job that changes its members every second for an hour is never slowed down.

    told: the slot's first wait was reported.
    """

    # Kinds that the agent writes into etcd; and the first of a session, which waits for what earlier ones have taken.
    WRITTEN: ClassVar = frozenset({"hello", "ready", "entered", "suspected", "training_done"})

    told: bool = False
    _heard: BytesBudget = field(default_factory=lambda: BytesBudget(8 << 20, 256 << 10))
    _written: BytesBudget = field(default_factory=etcd_budget)
    _member_bytes: int = 0

    def take(self, kind: str | None, size_bytes: int, now_s: float) -> float:
        """Returns how long to wait before the next message is read, in seconds; 0 as a rule."""
        delay_s = self._heard.take(size_bytes, now_s)
        if kind == "ready":
            self._member_bytes = size_bytes
        if kind in self.WRITTEN:
            # a small message has the whole member written again
            written_bytes = self._member_bytes if kind == "entered" else size_bytes
            delay_s = max(delay_s, self._written.take(written_bytes, now_s))
        return delay_s
