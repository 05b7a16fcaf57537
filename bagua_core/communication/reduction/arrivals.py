"""Records the order in which a backward brings the gradients, in one backward of each generation.

The order is measured, since a model need not use its parameters in the order in which it registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# the backward of a generation that is recorded: first ones may allocate, compile, or be a joiner's
WATCHED = 3


class Arrivals:
    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._place = {id(p): place for place, p in enumerate(parameters)}
        self.order: tuple[int, ...] = ()
        """Parameters by place, in the order in which their gradients came; empty: not known yet."""
        self.taken: list[int] | None = None
        """Those of the backward under way so far; None: it is not recorded."""
        self.begin_generation()

    def begin_generation(self) -> None:
        self._left = WATCHED
        self.taken = None

    def backward_begins(self) -> None:
        if self._left:
            self._left -= 1
            self.taken = None if self._left else []

    def came(self, parameter: torch.Tensor) -> None:
        if self.taken is not None:
            place = self._place.get(id(parameter))
            if place is not None:
                self.taken.append(place)

    def backward_ends(self) -> None:
        """Takes the order of the backward that ends. A backward that did not bring each gradient once is ignored."""
        taken, self.taken = self.taken, None
        if taken is not None and len(taken) == len(self._place) == len(set(taken)):
            self.order = tuple(taken)
