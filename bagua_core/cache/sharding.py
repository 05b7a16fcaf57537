"""Chooses the server that keeps a key. Pure: the same in every process and for every order of the list of servers.

Rendezvous hashing: each server draws a number for the key, and the highest has it. A server that is added or taken off
the list moves its own share of the keys and no others. One that is lost keeps its share: those keys are missing until
it is back, and no other server is asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b


class Sharding:
    def __init__(self, names: Sequence[str]) -> None:
        """names: of the servers, all different."""
        if not names or len(set(names)) != len(names):
            raise ValueError(f"servers {list(names)!r}: none, or one of them twice")
        self._seeds = [blake2b(name.encode(), digest_size=16).digest() for name in names]

    def owner(self, raw: bytes) -> int:
        """The number of the server that keeps the key with this digest."""
        if len(self._seeds) == 1:
            return 0
        drawn = [blake2b(raw, digest_size=8, key=seed).digest() for seed in self._seeds]
        return max(range(len(drawn)), key=drawn.__getitem__)

    def own_server(self, node: str) -> int:
        """The one server that this node uses where data is not sharded."""
        return self.owner(blake2b(node.encode(), digest_size=16).digest())
