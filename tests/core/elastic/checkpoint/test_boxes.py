"""Boxes of tensors: each element once or a reason, and runs of elements that are found again."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua_core.elastic.checkpoint.boxes import Box, boxes_of_run, problem_of_tiling, rows_in_common
from bagua_core.elastic.checkpoint.placement_index import Placed
from bagua_core.model.sharded_tensors import UnsavablePlacement, local_box

sizes = st.lists(st.integers(0, 4), min_size=0, max_size=4).map(tuple)


@given(sizes, st.integers(0, 300), st.integers(0, 300), st.data())
@settings(max_examples=200, deadline=None)
def test_a_run_is_made_of_its_boxes_in_order(
    size: tuple[int, ...], a: int, b: int, data: st.DataObject
) -> None:
    offset = tuple(data.draw(st.integers(0, 3)) for _ in size)
    box = Box(offset, size)
    first, last = sorted((a % (box.count + 1), b % (box.count + 1)))
    numbers = torch.arange(box.count).reshape(size)
    found = []
    boxes = list(boxes_of_run(box, first, last))
    for at, part in boxes:
        elements = numbers[part.slices_in(box)].flatten().tolist()
        assert elements[0] == at
        found += elements
    assert found == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(size))


@given(sizes, st.data())
@settings(max_examples=200, deadline=None)
def test_rows_in_common_are_the_same_elements(size: tuple[int, ...], data: st.DataObject) -> None:
    def drawn() -> Box:
        offset = tuple(data.draw(st.integers(0, n)) for n in size)
        return Box(offset, tuple(data.draw(st.integers(0, n - o)) for n, o in zip(size, offset, strict=True)))

    one, other = drawn(), drawn()
    numbers = torch.arange(math.prod(size)).reshape(size)
    mine, theirs = (numbers[b.slices_in(Box.whole(size))].flatten().tolist() for b in (one, other))
    rows = rows_in_common(one, other)
    common = one.common(other)
    shared = [] if common is None else numbers[common.slices_in(Box.whole(size))].flatten().tolist()
    assert sorted(set(mine) & set(theirs)) == shared
    if rows is not None:
        first, last, at = rows
        assert mine[first:last] == theirs[at : at + last - first] == shared


@pytest.mark.parametrize(
    ("shape", "placements", "mesh"),
    [
        ((5, 3), ("S(0)",), (2,)),
        ((1, 3), ("S(0)",), (4,)),
        ((5, 7), ("S(1)", "S(0)"), (2, 3)),
        ((7,), ("S(0)", "S(0)"), (2, 2)),
        ((7, 2), ("_S(0, 2)", "S(0)"), (2, 2)),
        ((), (), ()),
        ((0, 3), ("S(0)",), (2,)),
    ],
)
def test_the_boxes_of_all_coordinates_make_up_the_tensor(
    shape: tuple[int, ...], placements: tuple[str, ...], mesh: tuple[int, ...]
) -> None:
    boxes = [
        Box(*local_box(shape, placements, mesh, coordinate))
        for coordinate in itertools.product(*(range(n) for n in mesh))
    ]
    assert problem_of_tiling(boxes, shape) == ""
    assert "overlap" in problem_of_tiling([*boxes, *boxes], shape) or not math.prod(shape)


def test_strided_placements_that_make_no_boxes_are_refused() -> None:
    with pytest.raises(UnsavablePlacement, match="no boxes"):
        local_box((8,), ("_S(0, 2)",), (2,), (0,))
    with pytest.raises(UnsavablePlacement, match="no boxes"):
        local_box((8,), ("S(0)", "_S(0, 2)"), (2, 2), (0, 0))


def test_what_is_left_out_is_said() -> None:
    assert problem_of_tiling([Box((0,), (3,))], (4,)) == "1 of 4 elements are in no part"
    assert problem_of_tiling([Box((2,), (3,))], (4,)) == "[2:5] is not within [4]"
    # as many elements as the tensor has, and not each once
    assert problem_of_tiling([Box((0,), (3,)), Box((2,), (1,))], (4,)) == "[0:3] and [2:3] overlap"


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        [[4], [0], [2]],
        [[4], [0], [2], 4, 1],
        [[4], [3], [2], 4],
        [[4], [-1], [2], 4],
        [[4], [0, 0], [2], 4],
        [[4], [0], [2], 0],
        [[4], [0], [2], 1 << 40],
        [[4.0], [0], [2], 4],
        [[True], [0], [1], 4],
        [[1 << 62, 1 << 62], [0, 0], [1, 1], 4],
        [[1] * 100, [0] * 100, [1] * 100, 4],
        ["4", "0", "2", 4],
    ],
)
def test_an_odd_place_is_refused(odd: object) -> None:
    with pytest.raises(ValueError, match=r"place|box"):
        Placed.from_json(odd)
