"""The order of additions follows from the number of shards alone."""

from __future__ import annotations

from bagua_core.communication.shards.shard_tree import Node, cover, leaves_of, merges, root

MOST_SHARDS = 33


def sum_of(node: Node, count: int) -> str:
    """What a tree with `count` leaves adds, written out by its definition."""
    if not node.leaves(count):
        return ""
    if node.level == 0:
        return str(node.place)
    left, right = (sum_of(Node(node.level - 1, 2 * node.place + side), count) for side in (0, 1))
    return f"({left}+{right})" if right else left


def test_every_division_over_owners_adds_in_the_order_of_the_tree() -> None:
    for count in range(1, MOST_SHARDS):
        for owners in range(1, count + 3):
            nodes = [
                node for owner in range(owners) for node in cover(leaves_of(count, owners, owner), count)
            ]
            rows = [sum_of(node, count) for node in nodes]
            for merge in merges(nodes, count):
                rows[merge.left] = f"({rows[merge.left]}+{rows[merge.right]})"
            assert rows[0] == sum_of(root(count), count), (count, owners)


def test_a_cover_is_exact_and_small() -> None:
    for count in range(1, MOST_SHARDS):
        for begin in range(count):
            for end in range(begin + 1, count + 1):
                nodes = cover(range(begin, end), count)
                assert [leaf for node in nodes for leaf in node.leaves(count)] == list(range(begin, end))
                assert len(nodes) <= max(1, 2 * (count - 1).bit_length())


def test_one_node_each_where_the_workers_divide_a_power_of_two() -> None:
    for owners in (1, 2, 4, 8):
        assert all(len(cover(leaves_of(8, owners, owner), 8)) == 1 for owner in range(owners))


def test_leaves_that_are_missing_or_twice_are_no_sum() -> None:
    for nodes in ([Node(0, 0)], [Node(1, 0), Node(0, 1)], []):
        try:
            merges(nodes, 2)
        except ValueError:
            continue
        raise AssertionError(f"{nodes} were accepted")
