"""The parameters of a block: by kind, by size, and in the order in which their gradients lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_core.fused_optimizer.block_plan import (
    COMPILED,
    IN_CACHE,
    ON_ACCELERATOR,
    BlockPlan,
    BlockSizes,
    Candidate,
    plan_blocks,
)

SIZES = BlockSizes(pack_below=10, pack_up_to=20, cut_above=100)


def plan(
    *elements: int, kinds: str = "", gradients: dict[int, tuple[int, int]] | None = None
) -> list[BlockPlan]:
    found = gradients or {}
    return plan_blocks(
        [Candidate(i, n, kinds[i] if kinds else "a", SIZES, found.get(i)) for i, n in enumerate(elements)]
    )


def test_small_ones_share_up_to_a_size() -> None:
    assert plan(9, 9, 9, 2) == [BlockPlan((0, 1), (18,)), BlockPlan((2, 3), (11,))]


def test_one_alone_is_left() -> None:
    assert plan(9) == []


def test_large_ones_are_cut_evenly_and_those_between_are_left() -> None:
    assert plan(50, 250) == [BlockPlan((1,), (84, 84, 82))]


def test_kinds_do_not_mix() -> None:
    assert plan(3, 3, 3, 3, kinds="abab") == [BlockPlan((0, 2), (6,)), BlockPlan((1, 3), (6,))]


def test_members_lie_as_their_gradients_do() -> None:
    """As in a bucket, which begins with the last parameter; 9 has its gradient elsewhere."""
    where = {0: (7, 6), 1: (7, 3), 2: (7, 0), 3: (8, 0), 4: (9, 0)}
    assert plan(3, 3, 3, 3, 3, gradients=where) == [BlockPlan((2, 1, 0), (9,)), BlockPlan((3, 4), (6,))]


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from("ab")), max_size=30), st.booleans())
def test_every_parameter_is_in_one_block_at_most(members: list[tuple[int, str]], takes_all: bool) -> None:
    sizes = BlockSizes(10, 20, 100, takes_all)
    plans = plan_blocks([Candidate(i, n, kind, sizes) for i, (n, kind) in enumerate(members)])
    places = [place for one in plans for place in one.places]
    assert len(places) == len(set(places))
    for one in plans:
        assert sum(one.pieces) == sum(members[place][0] for place in one.places)
        assert len({members[place][1] for place in one.places}) == 1
        assert all(piece <= 100 for piece in one.pieces)
        assert len(one.places) == 1 or len(one.pieces) == 1
    if takes_all:
        assert set(places) == {i for i, (n, _) in enumerate(members) if n}


def test_sizes() -> None:
    assert IN_CACHE.pack_up_to < COMPILED.pack_up_to < ON_ACCELERATOR.pack_up_to
    with pytest.raises(ValueError, match="at least 1"):
        BlockSizes(0, 1, 1)
