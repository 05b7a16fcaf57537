"""Adds up the gradients of one worker's shards, bucket by bucket, in the order of the tree.

Owns the partial sums and their memory: at most about two for each level of the tree. Knows no communicator.
Invariant: after the worker's last shard the sums are the cover of its leaves (shard_tree.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bagua_core.communication.shards.shard_tree import Node, is_right_of, parent, raised


@dataclass(frozen=True, slots=True)
class PartialSum:
    """The sum of one node's leaves. values: [elements of the bucket]."""

    node: Node
    values: torch.Tensor


class PartialSums:
    """The partial sums of all buckets, by their numbers."""

    def __init__(self) -> None:
        self._held: dict[int, list[PartialSum]] = {}
        self._free: dict[int, list[torch.Tensor]] = {}

    def add(self, number: int, leaf: int, count: int, values: torch.Tensor) -> None:
        """Adds the bucket's leaf, one of `count`; the leaf before it was added before. `values` may be changed, and is
        not kept."""
        held = self._held.setdefault(number, [])
        node, total = raised(Node(0, leaf), count), values
        while held and is_right_of(node, held[-1].node):
            left = held.pop()
            left.values.add_(total)
            if total is not values:
                self._give_back(number, total)
            node, total = raised(parent(node), count), left.values
        held.append(PartialSum(node, self._copy(number, values) if total is values else total))

    def add_last(self, number: int, leaf: int, count: int, values: torch.Tensor) -> list[PartialSum]:
        """Adds the worker's last leaf of the bucket. Returns all sums of the bucket, in order of their leaves; the last
        one's values are `values` itself. The others' memory is the caller's until it gives it back."""
        held = self._held.pop(number, [])
        node = raised(Node(0, leaf), count)
        while held and is_right_of(node, held[-1].node):
            left = held.pop().values
            # right + left: addition of two floats is commutative, and the result belongs into the bucket
            values.add_(left)
            self._give_back(number, left)
            node = raised(parent(node), count)
        return [*held, PartialSum(node, values)]

    def give_back(self, number: int, sums: list[PartialSum]) -> None:
        """Takes back the memory of `add_last`'s result, but for the last one's."""
        for each in sums[:-1]:
            self._give_back(number, each.values)

    def drop(self) -> None:
        """Forgets all sums. Their memory is used again."""
        for number, held in self._held.items():
            self._free.setdefault(number, []).extend(each.values for each in held)
        self._held.clear()

    def renew(self) -> None:
        """Forgets all sums, and uses no memory again that an abandoned operation may still read."""
        self._held.clear()
        self._free.clear()

    def _copy(self, number: int, values: torch.Tensor) -> torch.Tensor:
        free = self._free.get(number)
        if not free:
            return values.clone()
        return free.pop().copy_(values)

    def _give_back(self, number: int, values: torch.Tensor) -> None:
        self._free.setdefault(number, []).append(values)
