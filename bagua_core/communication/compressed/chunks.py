"""Divides a bucket into the chunks that the ranks sum. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chunks:
    """The division of `elements` values among `owners` ranks in equal chunks; the last ones are filled up with
    zeros."""

    elements: int
    owners: int

    @property
    def size(self) -> int:
        """The number of values in a chunk."""
        return -(-self.elements // self.owners)

    @property
    def whole(self) -> int:
        """The number of chunks that need no filling up."""
        return self.elements // self.size if self.elements else self.owners

    @property
    def filled(self) -> int:
        """The number of chunks that are filled up; 0 if the elements can be divided evenly."""
        return self.owners - self.whole

    @property
    def rest(self) -> int:
        """The number of values in the first chunk that is filled up; the others hold zeros alone."""
        return self.elements - self.whole * self.size

    def region(self, owner: int) -> slice:
        """Returns the owner's values among all."""
        begin = min(owner * self.size, self.elements)
        return slice(begin, min(begin + self.size, self.elements))

    def runs(self, values: torch.Tensor, filled: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yields (owners, their values [owners, size]): the whole chunks where they lie, the others in `filled`.

        values: [elements]; filled: [filled * size], of any dtype.
        """
        if self.whole:
            yield slice(0, self.whole), values[: self.whole * self.size].view(self.whole, self.size)
        if self.filled:
            yield slice(self.whole, self.owners), filled.view(self.filled, self.size)

    def fill_up(self, values: torch.Tensor, filled: torch.Tensor) -> None:
        """Copies the values that are not in whole chunks to `filled`, and fills it up with zeros."""
        if self.filled:
            filled[: self.rest] = values[self.whole * self.size :]
            filled[self.rest :] = 0

    def take_back(self, filled: torch.Tensor, values: torch.Tensor) -> None:
        """Copies the values that are not in whole chunks from `filled` back to `values`."""
        if self.rest:
            values[self.whole * self.size :] = filled[: self.rest]
