"""A worker's sums are the cover of its leaves, in the bits of the tree, and few at a time."""

from __future__ import annotations

import torch

from bagua_core.communication.shards.partial_sums import PartialSums
from bagua_core.communication.shards.shard_tree import Node, cover, leaves_of


def leaf(number: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(number)) * 10.0 ** (number % 5)


def tree_sum(node: Node, count: int) -> torch.Tensor:
    if node.level == 0:
        return leaf(node.place)
    left, right = (Node(node.level - 1, 2 * node.place + side) for side in (0, 1))
    if not right.leaves(count):
        return tree_sum(left, count)
    return tree_sum(left, count) + tree_sum(right, count)


def test_sums_are_those_of_the_tree() -> None:
    sums = PartialSums()
    for count in (1, 2, 3, 7, 8, 12, 13):
        for owners in range(1, 5):
            for owner in range(owners):
                own = leaves_of(count, owners, owner)
                if not own:
                    continue
                for number in own[:-1]:
                    sums.add(0, number, count, leaf(number))
                found = sums.add_last(0, own[-1], count, leaf(own[-1]))
                assert [each.node for each in found] == cover(own, count)
                for each in found:
                    assert torch.equal(each.values, tree_sum(each.node, count)), (count, owners, owner)
                sums.give_back(0, found)


def test_few_sums_are_held_and_their_memory_is_used_again() -> None:
    sums, memory = PartialSums(), set()
    for _ in range(3):
        for number in range(63):
            sums.add(0, number, 64, torch.ones(4))
            memory |= {each.values.data_ptr() for each in sums._held[0]}
        (whole,) = sums.add_last(0, 63, 64, torch.ones(4))
        assert whole.values.tolist() == [64.0] * 4
    assert len(memory) <= 7  # a sum for each level below the root, and the one that is added


def test_forgotten_sums_are_gone() -> None:
    sums = PartialSums()
    sums.add(0, 0, 2, torch.ones(2))
    sums.drop()
    (alone,) = sums.add_last(0, 1, 2, torch.ones(2))
    assert alone.node == Node(0, 1)
