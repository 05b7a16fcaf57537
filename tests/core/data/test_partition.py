"""The split is a partition, even, and the same for everyone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.data.partition import (
    BatchSplit,
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


def sizes(count: int, parts: int, full: int, limit: int | None = None) -> list[list[int]]:
    """Samples by part and micro-batch."""
    split = BatchSplit(count, parts, full, limit)
    return [[len(split.places(part, micro)) for micro in range(split.micro_batches)] for part in range(parts)]


@given(
    full=st.integers(1, 100),
    short=st.integers(0, 99),
    parts=st.integers(1, 20),
    limit=st.none() | st.integers(1, 9),
)
def test_a_batch_is_split_whole_and_a_short_one_into_shares_of_two_and_more(
    full: int, short: int, parts: int, limit: int | None
) -> None:
    count = max(1, full - short)
    split = BatchSplit(count, parts, full, limit)
    places = [
        p for part in range(parts) for micro in range(split.micro_batches) for p in split.places(part, micro)
    ]
    assert places == list(range(count))
    assert split.micro_batches <= micro_batch_count(full, parts, limit), "a stream has no more"
    by_part = sizes(count, parts, full, limit)
    assert limit is None or max(map(max, by_part)) <= limit
    shares = [sum(part) for part in by_part]
    even = [len(share(count, parts, part)) for part in range(parts)]
    assert max(shares) <= -(-full // parts), "no larger than those of a full batch"
    if count == full or full < 2 * parts or limit == 1:
        assert shares == even
        return
    with_share = [s for s in shares if s]
    assert max(with_share) - min(with_share) <= 1 and shares == sorted(shares, reverse=True)
    if count > 1 and (count % 2 == 0 or full > 2 * parts):
        assert min(with_share) >= 2
    if limit is None or limit > 2:
        assert min(s for part in by_part for s in part if s) >= min(2, min(with_share))


def test_short_batches_as_the_documentation_has_them() -> None:
    assert sizes(9, 8, 64) == [[3], [2], [2], [2], [0], [0], [0], [0]]
    assert sizes(1, 8, 64) == [[1], *[[0]] * 7]
    assert sizes(9, 8, 9) == [[2], *[[1]] * 7], "a full batch stays as it is"
    assert sizes(5, 8, 8) == [[1]] * 5 + [[0]] * 3, "one sample for each worker is usual there"
    assert sizes(9, 8, 16) == [[2], *[[1]] * 7], "no share is larger than those of full batches"
    assert sizes(10, 4, 64, 2) == [[2, 1], [2, 1], [2, 0], [2, 0]]


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
