"""Keeps a model's weights in flat buffers, which are sent, averaged and written back.

Owns flat buffers and their layout. Knows no peers and no steps. Buffers that were handed to an operation which was
given up may still be written to: `renew` leaves them behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from bagua_core.model.sharded_tensors import Sharding, largest_part, local, sharding_of

_HALVES = frozenset({torch.float16, torch.bfloat16})
_COMPRESSIBLE = _HALVES | {torch.float32, torch.complex64}

# The weights that `make_equal` sends at a time. A piece, its result and the log's copy are in memory at once, beside a
# model that may have left little free.
EQUAL_PIECE_BYTES = 64 * 1024 * 1024


class FlatWeights:
    """A copy of `parameters` in flat buffers, one for each dtype, device and sharding; not filled yet.

    widen: half precision is held as float32. Means need that: a sum of equal weights is rounded in half precision, so
    the mean of equal models would be another model. Complex numbers are held as pairs of real ones.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], widen: bool = False) -> None:
        # The parameters themselves: a script may give them other memory later.
        self._groups = _grouped(parameters, widen)
        self._parameters = [p for group in self._groups.values() for p in group]
        self.renew()

    def renew(self) -> None:
        """Gives the copy new memory, not filled."""
        self.flats: list[torch.Tensor] = []
        for (dtype, device, _), group in self._groups.items():
            count = sum(_real(p).numel() for p in group)
            self.flats.append(torch.empty(count, dtype=dtype, device=device))
        self._views = self._views_of(self.flats)

    def like(self) -> list[torch.Tensor]:
        """Returns further buffers of the same shapes, zero."""
        return [torch.zeros_like(flat) for flat in self.flats]

    @torch.no_grad()
    def fill(self) -> None:
        """Takes the parameters' values."""
        torch._foreach_copy_(self._views, self._live())

    @torch.no_grad()
    def write_back(self) -> None:
        """Gives the parameters these values."""
        torch._foreach_copy_(self._live(), self._views)

    @torch.no_grad()
    def write_from(self, flats: Sequence[torch.Tensor]) -> None:
        """Gives the parameters the values of other buffers of this layout, and keeps its own."""
        torch._foreach_copy_(self._live(), self._views_of(flats))

    @torch.no_grad()
    def add_to_parameters(self, flats: Sequence[torch.Tensor]) -> None:
        """Adds the values of other buffers of this layout to the parameters."""
        torch._foreach_add_(self._live(), self._views_of(flats))

    @torch.no_grad()
    def take(self, flats: Sequence[torch.Tensor]) -> None:
        """Takes the values of other buffers of this layout."""
        torch._foreach_copy_(self.flats, list(flats))

    def _views_of(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns a view for each parameter, by group."""
        views: list[torch.Tensor] = []
        for flat, group in zip(flats, self._groups.values(), strict=True):
            shapes = [_real(p).shape for p in group]
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            views += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return views

    def _live(self) -> list[torch.Tensor]:
        return [_real(p) for p in self._parameters]


@torch.no_grad()
def make_equal(
    parameters: Sequence[torch.Tensor],
    average: Callable[[torch.Tensor], torch.Tensor],
    weight: float | None = None,
) -> None:
    """Replaces `parameters` by their mean over the job, in pieces of EQUAL_PIECE_BYTES at most.

    All workers make the same calls of `average` in the same order, those with other shards too. If members are lost in
    the middle, the pieces that follow are means over those that are left; the parameters are equal all the same.
    average: of one tensor, over all members. weight: of this member's values, above zero; None: all members count
    alike, and all of them give None.
    """
    for (dtype, device, _), group in _grouped(parameters, widen=True).items():
        for piece in _pieces(group, EQUAL_PIECE_BYTES // dtype.itemsize):
            # The weight goes with the values: both must be of the same members. It also keeps a piece from being empty
            # where this worker's shards are smaller than others'.
            count = sum(part.count for part in piece)
            flat = torch.empty(count + 1, dtype=dtype, device=device)
            flat[count] = 1.0 if weight is None else weight
            sizes = [part.count for part in piece]
            for part, value in zip(piece, torch.split(flat[:count], sizes), strict=True):
                part.read(value)
            if weight is not None:
                flat[:count].mul_(weight)
            mean = average(flat)
            means = mean[:count] if weight is None else mean[:count] / mean[count]
            for part, value in zip(piece, torch.split(means, sizes), strict=True):
                part.write(value)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the numbers of a parameter's memory on this worker, by their places in it, flat."""

    parameter: torch.Tensor
    begin: int
    count: int

    def read(self, out: torch.Tensor) -> None:
        out.copy_(_real(self.parameter).reshape(-1)[self.begin : self.begin + self.count])

    def write(self, values: torch.Tensor) -> None:
        own = _real(self.parameter)
        flat = own.reshape(-1)
        flat[self.begin : self.begin + self.count].copy_(values)
        if flat.data_ptr() != own.data_ptr():  # a copy, for the memory of `own` has another order
            own.copy_(flat.view(own.shape))


def _pieces(parameters: Sequence[torch.Tensor], most: int) -> Iterator[list[_Part]]:
    """Yields the pieces of the parameters. most: numbers in a piece. The workers with each shard have equally many
    pieces, though shards may differ in size: all are cut as the largest one is."""
    piece: list[_Part] = []
    room = most
    for parameter in parameters:
        own, parts = _real(parameter), 2 if parameter.is_complex() else 1
        begin, end = 0, max(own.numel(), largest_part(parameter) * parts)
        while begin < end:
            taken = min(room, end - begin)
            here = min(own.numel(), begin + taken) - min(own.numel(), begin)
            piece.append(_Part(parameter, min(own.numel(), begin), here))
            begin, room = begin + taken, room - taken
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def check_compressible(parameters: Sequence[torch.Tensor], what: str) -> None:
    """Raises ValueError for weights that lose more than the last bits as float32."""
    for parameter in parameters:
        if parameter.dtype not in _COMPRESSIBLE:
            raise ValueError(
                f"{what} compresses weights of 32 or 16 bits; a parameter of shape {tuple(parameter.shape)} is "
                f"{parameter.dtype}. Convert the model to float32, or use another algorithm"
            )


def _real(parameter: torch.Tensor) -> torch.Tensor:
    own = local(parameter)
    return torch.view_as_real(own) if own.is_complex() else own


def _grouped(
    parameters: Sequence[torch.Tensor], widen: bool
) -> dict[tuple[torch.dtype, torch.device, Sharding], list[torch.Tensor]]:
    """Groups the parameters by the dtype in which they are held, the device, and the sharding. Means of values that
    several workers of a replica hold must have the same bits on all of them; see plan_buckets."""
    groups: dict[tuple[torch.dtype, torch.device, Sharding], list[torch.Tensor]] = {}
    for parameter in parameters:
        dtype = _real(parameter).dtype
        held_as = torch.float32 if widen and dtype in _HALVES else dtype
        groups.setdefault((held_as, parameter.device, sharding_of(parameter)), []).append(parameter)
    return groups
