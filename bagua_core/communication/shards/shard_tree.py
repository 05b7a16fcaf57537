"""The fixed tree over the virtual shards of a batch, by which their gradients are summed.

Pure. Node (level, place) holds the leaves from place * 2**level to (place + 1) * 2**level - 1, as far as they exist.
Its sum is left + right; without a right child it is the left child's. Invariant: the order of additions follows from
the number of leaves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Node(NamedTuple):
    """A node of the tree: a sum of neighbouring leaves."""

    level: int
    place: int

    def leaves(self, count: int) -> range:
        """Returns the node's leaves in a tree with `count` leaves."""
        return range(min(self.place << self.level, count), min((self.place + 1) << self.level, count))


class Merge(NamedTuple):
    """An addition of row `right` to row `left`, which then holds their sum."""

    left: int
    right: int


def root(count: int) -> Node:
    """Returns the root of a tree with `count` leaves, at least 1."""
    return Node((count - 1).bit_length(), 0)


def leaves_of(count: int, owners: int, owner: int) -> range:
    """Returns the leaves that owner number `owner` of `owners` computes; the first owners have one more if need be."""
    least, more = divmod(count, owners)
    begin = owner * least + min(owner, more)
    return range(begin, begin + least + (owner < more))


def cover(leaves: range, count: int) -> list[Node]:
    """Returns the fewest nodes that together hold exactly `leaves`, in order of the leaves. count: leaves of the
    tree."""
    found: list[Node] = []
    if not leaves:
        return found
    unseen = [root(count)]
    while unseen:
        node = unseen.pop()
        own = node.leaves(count)
        if not own or own.stop <= leaves.start or leaves.stop <= own.start:
            continue
        if leaves.start <= own.start and own.stop <= leaves.stop:
            found.append(node)
        else:
            unseen += [Node(node.level - 1, 2 * node.place + 1), Node(node.level - 1, 2 * node.place)]
    return found


def raised(node: Node, count: int) -> Node:
    """Returns the highest node with the same sum: its ancestors that have no other leaves."""
    while node.level < root(count).level and node.place % 2 == 0:
        if (node.place + 1) << node.level < count:
            break
        node = Node(node.level + 1, node.place // 2)
    return node


def is_right_of(node: Node, other: Node) -> bool:
    """Tells whether `other` is the left sibling of `node`."""
    return node.level == other.level and node.place % 2 == 1 and other.place == node.place - 1


def parent(node: Node) -> Node:
    return Node(node.level + 1, node.place // 2)


def merges(nodes: Sequence[Node], count: int) -> list[Merge]:
    """Returns the additions by which rows that hold these nodes' sums become the root's sum, in the first row.

    nodes: in order of their leaves; together they hold each leaf once. Raises ValueError if they do not.
    """
    plan: list[Merge] = []
    stack: list[tuple[Node, int]] = []
    for row, leaf_sum in enumerate(nodes):
        node = raised(leaf_sum, count)
        while stack and is_right_of(node, stack[-1][0]):
            _, left = stack.pop()
            plan.append(Merge(left, row))
            node, row = raised(parent(node), count), left
        stack.append((node, row))
    if [node for node, _ in stack] != [root(count)]:
        raise ValueError(f"{list(nodes)} do not hold each of {count} leaves once")
    return plan
