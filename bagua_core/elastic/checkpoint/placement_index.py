"""The placement index of a part: which box of each global tensor its shard holds. Decides whether parts are whole.

The part's header contains the index, whose entries are small, so headers suffice to decide. Nothing of it is believed
before it was checked: a header may come from a damaged disk.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bagua_core.elastic.checkpoint.boxes import Box, problem_of_tiling

if TYPE_CHECKING:
    from bagua_core.elastic.checkpoint.part_file import Entry, Header

_MOST = 1 << 63
_MOST_DIMENSIONS = 64
_MOST_ITEM_BYTES = 64


@dataclass(frozen=True, slots=True)
class Placed:
    """The part of one tensor that a shard holds."""

    shape: tuple[int, ...]  # of the global tensor
    box: Box
    itemsize: int  # bytes of an element

    def to_json(self) -> list[Any]:
        return [list(self.shape), list(self.box.offset), list(self.box.size), self.itemsize]

    @staticmethod
    def from_json(value: Any) -> Placed:
        """Reads what `to_json` gave. Raises ValueError for what no shard can hold."""
        try:
            shape, offset, size = (tuple(numbers) for numbers in value[:3])
            (itemsize,) = value[3:]
        except (TypeError, ValueError) as error:
            raise ValueError(f"a place that is none: {error}") from error
        if not all(type(n) is int and 0 <= n < _MOST for n in (*shape, *offset, *size, itemsize)):
            raise ValueError("a place whose numbers are none")
        if len(shape) > _MOST_DIMENSIONS or math.prod(shape) >= _MOST or not 0 < itemsize <= _MOST_ITEM_BYTES:
            raise ValueError("a place of a tensor that does not exist")
        placed = Placed(shape, Box(offset, size), itemsize)
        if not placed.box.is_within(shape):
            raise ValueError(f"a box {offset}, {size} outside of its tensor {shape}")
        return placed


def problem_of(headers: Sequence[Header]) -> str:
    """Returns why the sharded tensors of these parts are not whole; empty if they are.

    headers: of all parts, in order.
    """
    for number, header in enumerate(headers):
        if header.parts % header.shards or header.shard != number % header.shards:
            return f"part {number} says that it is of shard {header.shard} of {header.shards}"
    boxes: dict[str, dict[int, Placed]] = defaultdict(dict)
    runs: dict[tuple[str, int], list[Entry]] = defaultdict(list)
    for header in headers:
        for name, placed in header.placed.items():
            if boxes[name].setdefault(header.shard, placed) != placed:
                return f"{name} has two places in shard {header.shard}"
        for entry in header.entries:
            if entry.tensor in header.placed:
                runs[entry.tensor, header.shard].append(entry)
    for name, by_shard in boxes.items():
        kinds = {(placed.shape, placed.itemsize) for placed in by_shard.values()}
        if len(kinds) > 1:
            return f"{name} has several shapes: {sorted(kinds)}"
        problem = problem_of_tiling([p.box for p in by_shard.values()], next(iter(kinds))[0])
        if problem:
            return f"{name}: {problem}"
        for shard, placed in by_shard.items():
            if not _is_covered(runs[name, shard], placed):
                return f"{name} of shard {shard} is not whole in its parts"
    return ""


def _is_covered(entries: Iterable[Entry], placed: Placed) -> bool:
    at = 0
    for entry in sorted(entries, key=lambda e: e.first):
        if entry.first * placed.itemsize != at:
            return False
        at += entry.size_bytes
    return at == placed.box.count * placed.itemsize
