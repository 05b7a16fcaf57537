"""Finds when things happened by the reader's clock, although their records carry the times of other hosts' clocks.

Something that appears between two looks happened between them. Within that interval the time in its record decides; at
a page's first look the interval has no begin. Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class FirstSeen(Generic[K]):
    """The times of things by the reader's clock. It holds no more than the newest look has."""

    def __init__(self) -> None:
        self._looked_unix_s = float("-inf")
        self._since_unix_s: dict[K, float] = {}

    def take(self, written_unix_s: Mapping[K, float], at_unix_s: float) -> None:
        """Takes a look. written_unix_s: all there are at the look at at_unix_s, with the times in their records."""
        earliest_s = min(self._looked_unix_s, at_unix_s)
        known = self._since_unix_s
        self._since_unix_s = {
            key: known[key] if key in known else min(max(written_s, earliest_s), at_unix_s)
            for key, written_s in written_unix_s.items()
        }
        self._looked_unix_s = at_unix_s

    def unix_s(self, key: K) -> float:
        """Returns when a thing happened; minus infinity for what the newest look does not have."""
        return self._since_unix_s.get(key, float("-inf"))
