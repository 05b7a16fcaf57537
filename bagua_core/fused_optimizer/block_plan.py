"""Plans which parameters lie together in a block, in which order, which are cut into several, and how large blocks are.

Pure: counts of elements, no tensors. The one home of the sizes. On a CPU a step makes several passes over a block, so
its parameter, gradient and states should stay in the cache between them; a GPU and compiled code make few passes, and
large blocks mean fewer launches. Invariants: members of a block are of one kind (see Candidate); no parameter is in two
blocks; one that no block takes is left to the optimizer as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The sizes of blocks, all in elements.

    pack_below: parameters smaller than this share a block. pack_up_to: of a block of several. cut_above: parameters
    larger than this are several blocks, each no larger. takes_all: whether a parameter of a size in between is a block
    of its own, instead of being left to the optimizer as it is.
    """

    pack_below: int
    pack_up_to: int
    cut_above: int
    takes_all: bool = False

    def __post_init__(self) -> None:
        if self.pack_below < 1 or self.pack_up_to < 1 or self.cut_above < 1:
            raise ValueError(f"sizes of blocks are counts of elements, at least 1: {self}")


_NEVER = 1 << 62
# A step's temporaries are as large as a block. Those of 1 MiB malloc hands out again; larger ones it may give back to
# the system in each step (until the process has freed something larger) and pay for every page anew, which doubles a
# step. Pieces of one large parameter are larger nevertheless: there fewer calls were worth more.
IN_CACHE = BlockSizes(pack_below=1 << 16, pack_up_to=1 << 18, cut_above=1 << 19)
ON_ACCELERATOR = BlockSizes(pack_below=1 << 20, pack_up_to=1 << 26, cut_above=_NEVER)
COMPILED = BlockSizes(pack_below=1 << 16, pack_up_to=1 << 22, cut_above=_NEVER, takes_all=True)
# Where gradients stay where they are from step to step: to bring large ones together costs once, and each block a call.
COMPILED_GRADIENTS_STAY = BlockSizes(pack_below=1 << 22, pack_up_to=1 << 24, cut_above=_NEVER, takes_all=True)


def sizes_for(device: torch.device, compiled: bool = False, gradients_stay: bool = False) -> BlockSizes:
    if compiled:
        return COMPILED_GRADIENTS_STAY if gradients_stay else COMPILED
    return IN_CACHE if device.type == "cpu" else ON_ACCELERATOR


@dataclass(frozen=True, slots=True)
class Candidate:
    """One parameter as planning sees it.

    place: in its group. kind: all that must be equal in a block: dtype, device, how far its state is. gradient: the
    memory (any name of it) in which its gradient lies and the offset there, None without a gradient.
    """

    place: int
    elements: int
    kind: Hashable
    sizes: BlockSizes
    gradient: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """A planned block.

    places: of the members, in the order in which they lie. pieces: elements of each part of a member that is cut.
    """

    places: tuple[int, ...]
    pieces: tuple[int, ...]


def plan_blocks(candidates: Sequence[Candidate]) -> list[BlockPlan]:
    """Plans the blocks of the candidates.

    Members whose gradients lie in one memory, as in a bucket, are taken in that order: no gradient is copied then.
    """
    by_kind: dict[Hashable, list[Candidate]] = {}
    for candidate in candidates:
        by_kind.setdefault(candidate.kind, []).append(candidate)
    plans: list[BlockPlan] = []
    for members in by_kind.values():
        sizes = members[0].sizes
        small = [c for c in members if 0 < c.elements < sizes.pack_below]
        for run in _runs(small):
            plans += _packed(run, sizes)
        for one in members:
            if one.elements >= sizes.pack_below and (sizes.takes_all or one.elements > one.sizes.cut_above):
                plans.append(BlockPlan((one.place,), _pieces(one.elements, one.sizes.cut_above)))
    return plans


def _runs(small: Sequence[Candidate]) -> Iterable[list[Candidate]]:
    """Yields parameters by the memory of their gradients, if several share it; the others in registration order."""
    by_memory: dict[int, list[Candidate]] = {}
    for one in small:
        if one.gradient is not None:
            by_memory.setdefault(one.gradient[0], []).append(one)
    together = {memory: run for memory, run in by_memory.items() if len(run) > 1}
    for run in together.values():
        yield sorted(run, key=lambda c: (c.gradient or (0, 0))[1])
    yield [one for one in small if one.gradient is None or one.gradient[0] not in together]


def _packed(run: Iterable[Candidate], sizes: BlockSizes) -> list[BlockPlan]:
    plans: list[BlockPlan] = []
    members: list[Candidate] = []
    elements = 0

    def close() -> None:
        if len(members) > 1 or (members and sizes.takes_all):
            plans.append(BlockPlan(tuple(m.place for m in members), (elements,)))

    for one in run:
        if members and elements + one.elements > sizes.pack_up_to:
            close()
            members, elements = [], 0
        members.append(one)
        elements += one.elements
    close()
    return plans


def _pieces(elements: int, most: int) -> tuple[int, ...]:
    """Divides a parameter's elements into pieces as equal as can be: the last piece is not a small rest."""
    count = -(-elements // most)
    size = -(-elements // count)
    return tuple(min(size, elements - begin) for begin in range(0, elements, size))
