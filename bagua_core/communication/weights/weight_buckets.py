"""Keeps a model's weights in flat buffers, which are sent, averaged and written back.

Owns flat buffers and their layout. Knows no peers and no steps. Buffers that were handed to an operation which was
given up may still be written to: `renew` leaves them behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua_core.model.sharded_tensors import is_sharded, local

_HALVES = frozenset({torch.float16, torch.bfloat16})
_COMPRESSIBLE = _HALVES | {torch.float32, torch.complex64}


class FlatWeights:
    """A copy of `parameters` in flat buffers, one for each dtype and device, and others for shards; not filled yet.

    widen: half precision is held as float32. Means need that: a sum of equal weights is rounded in half precision, so
    the mean of equal models would be another model. Complex numbers are held as pairs of real ones.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], widen: bool = False) -> None:
        groups: dict[tuple[torch.dtype, torch.device, bool], list[torch.Tensor]] = {}
        for parameter in parameters:
            dtype = _real(parameter).dtype
            held_as = torch.float32 if widen and dtype in _HALVES else dtype
            groups.setdefault((held_as, parameter.device, is_sharded(parameter)), []).append(parameter)
        # The parameters themselves: a script may give them other memory later.
        self._groups = groups
        self._parameters = [p for group in groups.values() for p in group]
        self.renew()

    def renew(self) -> None:
        """New memory, not filled."""
        self.flats: list[torch.Tensor] = []
        for (dtype, device, _), group in self._groups.items():
            count = sum(_real(p).numel() for p in group)
            self.flats.append(torch.empty(count, dtype=dtype, device=device))
        self._views = self._views_of(self.flats)

    def like(self) -> list[torch.Tensor]:
        """Further buffers of the same shapes, zero."""
        return [torch.zeros_like(flat) for flat in self.flats]

    @torch.no_grad()
    def fill(self) -> None:
        """Take the parameters' values."""
        torch._foreach_copy_(self._views, self._live())

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the parameters these values."""
        torch._foreach_copy_(self._live(), self._views)

    @torch.no_grad()
    def write_from(self, flats: Sequence[torch.Tensor]) -> None:
        """Give the parameters the values of other buffers of this layout, and keep one's own."""
        torch._foreach_copy_(self._live(), self._views_of(flats))

    @torch.no_grad()
    def add_to_parameters(self, flats: Sequence[torch.Tensor]) -> None:
        """Add the values of other buffers of this layout to the parameters."""
        torch._foreach_add_(self._live(), self._views_of(flats))

    @torch.no_grad()
    def take(self, flats: Sequence[torch.Tensor]) -> None:
        """Take the values of other buffers of this layout."""
        torch._foreach_copy_(self.flats, list(flats))

    def _views_of(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One for each parameter, by group."""
        views: list[torch.Tensor] = []
        for flat, group in zip(flats, self._groups.values(), strict=True):
            shapes = [_real(p).shape for p in group]
            parts = torch.split(flat, [shape.numel() for shape in shapes])
            views += [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        return views

    def _live(self) -> list[torch.Tensor]:
        return [_real(p) for p in self._parameters]


def make_equal(
    parameters: Sequence[torch.Tensor],
    average: Callable[[torch.Tensor], torch.Tensor],
    weight: float | None = None,
) -> None:
    """Replace `parameters` by their mean over the job.

    average: of one tensor, over all members. weight: of this member's values, above zero; None: all members count
    alike, and all of them give None.
    """
    weights = FlatWeights(parameters, widen=True)
    weights.fill()
    if weight is None:
        weights.take([average(flat) for flat in weights.flats])
    else:
        weights.take([average(flat * weight) / average(flat.new_tensor([weight])) for flat in weights.flats])
    weights.write_back()


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
