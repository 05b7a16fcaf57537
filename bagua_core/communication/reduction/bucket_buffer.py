"""Keeps one bucket's memory: a flat buffer, a view of it for each gradient, and how many are still missing.

Owns the layout. Does not know what the gradients are, nor what reduces them. `renew` gives the bucket fresh memory, so
that an abandoned operation can go on writing into the old one unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_core.communication.communicator import Pending
from bagua_core.communication.reduction.buckets import BucketPlan, carries_tail
from bagua_core.model.sharded_tensors import local

TAIL_ELEMENTS = 12
"""The switch pair (elastic/membership/switch_pair.py), the sums of step_counts.py and of reduction_place.py, how many
ranks froze or unfroze some, the sums of reported_loss.py, and step_tail.py's probe."""


class Bucket:
    """A bucket: a flat buffer for the gradients of some parameters.

    parameters: all of the reducer's, in registration order; only the plan's members are used.
    with_tail: whether numbers behind the gradients are summed with them.
    tail: these numbers, or None.
    """

    def __init__(self, plan: BucketPlan, parameters: Sequence[torch.Tensor], with_tail: bool) -> None:
        if with_tail and not carries_tail(plan):
            raise ValueError(f"a bucket of {plan.dtype} on {plan.device} cannot carry the switch pair")
        self.plan = plan
        self.missing = len(plan.members)
        self.pending: Pending | None = None
        self.parameters = [parameters[i] for i in plan.members]
        self._with_tail = with_tail
        self.renew()

    def renew(self) -> None:
        """Gives the bucket new memory, all zero."""
        elements = self.plan.elements + (TAIL_ELEMENTS if self._with_tail else 0)
        self.flat = torch.zeros(elements, dtype=self.plan.dtype, device=self.plan.device)
        self.pending = None
        self.views = [
            _view_like(self.flat, offset, local(parameter))
            for offset, parameter in zip(self.plan.offsets, self.parameters, strict=True)
        ]
        self.tail = self.flat[self.plan.elements :] if self._with_tail else None

    def rearm(self) -> None:
        """Marks all members as missing again, without an operation."""
        self.missing = len(self.plan.members)
        self.pending = None

    @property
    def reducible(self) -> torch.Tensor:
        """The tensor that goes to the communicator; complex numbers travel as pairs of real ones."""
        return torch.view_as_real(self.flat).reshape(-1) if self.flat.is_complex() else self.flat


def _view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Returns a view of `flat` in the parameter's shape, and with its strides where it is dense: autograd then never
    copies."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
    if dense:
        return flat.as_strided(parameter.shape, parameter.stride(), offset)
    return flat[offset : offset + parameter.numel()].view(parameter.shape)
