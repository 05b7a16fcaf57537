"""How many elements lie in a block, on which device? The one home of these numbers.

On a CPU a step makes several passes over a block, so its parameter, gradient and states should stay in the cache
between them; a GPU and compiled code make few passes, and large blocks mean fewer launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch


class Way(Enum):
    """Who passes over a block's elements?"""

    BY_OPERATION = auto()  # the optimizer's own step, one operation after the other
    COMPILED = auto()  # what torch.compile has made of it
    BY_LIBRARY = auto()  # the CPU's library, tile by tile


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """All in elements.

    pack_below: parameters smaller than this share a block. pack_up_to: of a block of several. cut_above: parameters
    larger than this are several blocks, each no larger. takes_all: whether a parameter of a size in between is a
    block of its own, instead of being left to the optimizer as it is.
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


BY_LIBRARY = BlockSizes(pack_below=1 << 16, pack_up_to=1 << 18, cut_above=_NEVER, takes_all=True)


def sizes_for(device: torch.device, way: Way, gradients_stay: bool = False) -> BlockSizes:
    if way is Way.COMPILED:
        return COMPILED_GRADIENTS_STAY if gradients_stay else COMPILED
    if way is Way.BY_LIBRARY:
        return BY_LIBRARY
    return IN_CACHE if device.type == "cpu" else ON_ACCELERATOR
