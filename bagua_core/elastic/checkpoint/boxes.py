"""Computes with boxes of a global tensor: whether they make it up, and which of their elements lie in which others.

Pure. A box is what one shard holds of a tensor: an offset and a size in each dimension. Its elements are written in
row-major order, and cut into runs. A tensor without dimensions is a box of one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Box:
    offset: tuple[int, ...]
    size: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(o + s for o, s in zip(self.offset, self.size, strict=True))

    def is_within(self, shape: Sequence[int]) -> bool:
        return len(self.offset) == len(self.size) == len(shape) and all(
            o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(self.offset, self.size, shape, strict=True)
        )

    def common(self, other: Box) -> Box | None:
        """Returns the box of the elements that both hold; None if there is none."""
        begin = tuple(map(max, self.offset, other.offset))
        size = tuple(e - b for b, e in zip(begin, map(min, self.end, other.end), strict=True))
        return Box(begin, size) if all(s > 0 for s in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Returns the place of this box in the tensor of `outer`, which contains it."""
        return tuple(
            slice(o - base, o - base + s)
            for o, s, base in zip(self.offset, self.size, outer.offset, strict=True)
        )


def problem_of_tiling(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Returns why the boxes do not hold each element of a tensor of `shape` exactly once; empty if they do."""
    outside = next((box for box in boxes if not box.is_within(shape)), None)
    if outside is not None:
        return f"{_shown(outside)} is not within {list(shape)}"
    missing = math.prod(shape) - sum(box.count for box in boxes)
    if missing > 0:
        return f"{missing} of {math.prod(shape)} elements are in no part"
    twice = _overlap(sorted(box for box in boxes if box.count))
    if twice is not None:
        return f"{_shown(twice[0])} and {_shown(twice[1])} overlap"
    return ""


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Returns two boxes that share an element, or None.

    boxes: in order, so that later ones begin further in the first dimension.
    """
    open_boxes: list[Box] = []
    for box in boxes:
        if box.offset:
            open_boxes = [other for other in open_boxes if other.end[0] > box.offset[0]]
        for other in open_boxes:
            if box.common(other) is not None:
                return other, box
        open_boxes.append(box)
    return None


def _shown(box: Box) -> str:
    return "[" + ", ".join(f"{o}:{e}" for o, e in zip(box.offset, box.end, strict=True)) + "]"


def boxes_of_run(box: Box, first: int, last: int) -> Iterator[tuple[int, Box]]:
    """Yields the elements `first` to `last` of `box`, in row-major order, as boxes of the same tensor.

    With each box comes the number of its first element in `box`. There are at most two for each dimension, and one.
    """
    if first >= last:
        return
    if not box.size:
        yield 0, box
        return
    row = math.prod(box.size[1:])
    begin, end = -(-first // row), last // row
    if begin > end:  # within one row
        yield from _of_row(box, end, row, first, last)
        return
    yield from _of_row(box, begin - 1, row, first, begin * row)
    if begin < end:
        offset = (box.offset[0] + begin, *box.offset[1:])
        yield begin * row, Box(offset, (end - begin, *box.size[1:]))
    yield from _of_row(box, end, row, end * row, last)


def _of_row(box: Box, number: int, row: int, first: int, last: int) -> Iterator[tuple[int, Box]]:
    """Yields the part of `boxes_of_run` in one row."""
    inner = Box(box.offset[1:], box.size[1:])
    for at, found in boxes_of_run(inner, first - number * row, last - number * row):
        yield number * row + at, Box((box.offset[0] + number, *found.offset), (1, *found.size))


def rows_in_common(box: Box, other: Box) -> tuple[int, int, int] | None:
    """Returns (first, last, first of `other`) of the elements of `box` that are in `other`.

    None unless it is certain that they are one run in both.
    """
    if box == other:
        return 0, box.count, 0
    if not box.size or (box.offset[1:], box.size[1:]) != (other.offset[1:], other.size[1:]):
        return None
    row = math.prod(box.size[1:])
    begin, end = max(box.offset[0], other.offset[0]), min(box.end[0], other.end[0])
    if begin >= end:
        return 0, 0, 0
    return (begin - box.offset[0]) * row, (end - box.offset[0]) * row, (begin - other.offset[0]) * row
