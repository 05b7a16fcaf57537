"""The split is a partition, even, and the same for everyone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.data.partition import (
    batch_count,
    epoch_order,
    global_batch,
    micro_batch_count,
    micro_share,
    mixed_seed,
    share,
)


@given(count=st.integers(0, 200), parts=st.integers(1, 40))
def test_shares_are_even_and_cover(count: int, parts: int) -> None:
    shares = [share(count, parts, part) for part in range(parts)]
    assert [place for s in shares for place in s] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(count=st.integers(1, 200), parts=st.integers(1, 40), limit=st.none() | st.integers(1, 20))
def test_micro_batches_are_within_the_limit_and_cover(count: int, parts: int, limit: int | None) -> None:
    micro_batches = micro_batch_count(count, parts, limit)
    places = []
    for part in range(parts):
        for micro in range(micro_batches):
            piece = micro_share(count, parts, part, micro_batches, micro)
            assert limit is None or len(piece) <= limit
            places += list(piece)
    assert places == list(range(count))
    if limit is not None and micro_batches > 1:
        assert -(-count // parts) > limit * (micro_batches - 1), "no more micro-batches than needed"


def test_order_is_pinned() -> None:
    """Changing it would train resumed jobs on other samples than their position says."""
    assert epoch_order(7, 3, 10, True).tolist() == [1, 5, 7, 8, 2, 6, 3, 9, 4, 0]
    assert epoch_order(7, 3, 4, False).tolist() == [0, 1, 2, 3]


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(epoch_order(s, e, 50, True).tolist()) for s in range(3) for e in range(3)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


@given(length=st.integers(1, 60), size=st.integers(1, 20))
def test_batches_cover_the_epoch(length: int, size: int) -> None:
    order = torch.arange(length)
    kept = [global_batch(order, b, size) for b in range(batch_count(length, size, False))]
    assert torch.cat(kept).tolist() == list(range(length))
    dropped = [global_batch(order, b, size) for b in range(batch_count(length, size, True))]
    assert all(b.numel() == size for b in dropped)


def test_mixed_seeds_depend_on_every_part_and_its_place() -> None:
    seeds = {mixed_seed(a, b) for a in range(-20, 20) for b in range(-20, 20)}
    assert len(seeds) == 1600
