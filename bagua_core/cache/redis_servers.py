"""Decides which Redis server keeps a key, and when one that failed is tried again. Pure.

Rendezvous hashing: each server draws a number for the key, and the highest has it, in every process and for every order
of the list of servers. A server that is added or taken off the list moves its own share of the keys and no others. One
that is lost keeps its share: those keys are missing until it is back, and no other server is asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class Sharding:
    def __init__(self, names: Sequence[str]) -> None:
        """Takes the names of the servers. Raises ValueError if there are none, or one of them twice."""
        if not names or len(set(names)) != len(names):
            raise ValueError(f"servers {list(names)!r}: none, or one of them twice")
        self._seeds = [blake2b(name.encode(), digest_size=16).digest() for name in names]

    def owner(self, raw: bytes) -> int:
        """Returns the number of the server that keeps the key with this digest."""
        if len(self._seeds) == 1:
            return 0
        drawn = [blake2b(raw, digest_size=8, key=seed).digest() for seed in self._seeds]
        return max(range(len(drawn)), key=drawn.__getitem__)

    def own_server(self, node: str) -> int:
        """Returns the number of the one server that this node uses where data is not sharded."""
        return self.owner(blake2b(node.encode(), digest_size=16).digest())


class ServerHealth:
    """Decides when a server that failed is tried again. Time is an argument: seconds of a clock that does not jump."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._ask_from_s = 0.0

    @property
    def is_lost(self) -> bool:
        return self._pause_s > 0

    def may_ask(self, now_s: float) -> bool:
        return now_s >= self._ask_from_s

    def failed(self, now_s: float) -> None:
        """Notes a failure and begins a pause. Pauses double: 1 s, 2 s, ... LONGEST_PAUSE_S."""
        self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
        self._ask_from_s = now_s + self._pause_s

    def answered(self) -> bool:
        """Notes an answer. Returns whether the server was lost before."""
        was_lost, self._pause_s, self._ask_from_s = self.is_lost, 0.0, 0.0
        return was_lost
