"""Converts gradients to units of Adam's steps and back, in place, with a QAdamOptimizer's moments in a bucket's layout.

Knows no ranks. Parameters that have not been stepped have no moments: all their elements are late.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua_core import kernels
from bagua_core.algorithms.qadam_optimizer import QAdamOptimizer, flat_like
from bagua_core.communication.compressed.compressed_sum import Load


@dataclass(frozen=True, slots=True)
class _Member:
    """A parameter's place in a bucket. view: of its gradient, in its shape."""

    parameter: torch.Tensor
    offset: int
    view: Tensor

    def part_of(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.parameter.numel()]


@dataclass(frozen=True, slots=True)
class _Units:
    """The moments of a parameter, and the numbers that Adam uses with them.

    first, second: the moments as the bucket lays them out. eps: in units of the root of `second`, which lacks the bias
    correction.
    """

    first: Tensor
    second: Tensor
    eps: float
    beta1: float


class BucketMoments:
    """The moments of the parameters whose gradients `load` holds."""

    def __init__(self, optimizer: QAdamOptimizer, load: Load) -> None:
        self._optimizer = optimizer
        self._values = load.values
        self._members = [
            _Member(parameter, offset, view)
            for parameter, offset, view in zip(load.parameters, load.plan.offsets, load.views, strict=True)
        ]

    def late_count(self) -> int:
        return sum(self._optimizer.late_count(member.parameter) for member in self._members)

    def late_mask(self) -> Tensor:
        """Returns a mask, [elements], that is true where an element is late."""
        mask = torch.zeros(self._values.numel(), dtype=torch.bool, device=self._values.device)
        for member in self._members:
            late = self._optimizer.late_elements(member.parameter)
            if late is not None:
                member.part_of(mask).copy_(flat_like(member.view, late))
        return mask

    def begin(self, weight: float, into: Tensor) -> None:
        """Writes `weight` times the optimizer's momentum, as sums of gradients / d, to `into`: fp32, [elements]."""
        for member, units in self._measured():
            part = member.part_of(into)
            if units is None:
                part.zero_()
                continue
            scale = units.second.float().sqrt().add_(units.eps)
            part.copy_(units.first).mul_(weight / (1 - units.beta1)).div_(scale)

    def encode(self, before: Tensor, after: Tensor, reach: float) -> None:
        """Sets values = after = beta1 * before + values / d, with values / d cut at `reach`; see kernels.adam_steps.

        before, after: fp32, [elements], maybe the same. Late elements get numbers without a meaning.
        """
        for member, units in self._measured():
            if units is None:
                member.part_of(after).zero_()
                continue
            kernels.adam_steps(
                member.part_of(self._values),
                units.second,
                units.eps,
                reach,
                before=member.part_of(before),
                after=member.part_of(after),
                decay=units.beta1,
            )

    def decode(self, earlier: Tensor | None) -> None:
        """Sets values = d * (values - beta1 * earlier). earlier: [elements]; None: as `begin` makes it for a weight of
        1."""
        if earlier is None:
            earlier = torch.empty_like(self._values, dtype=torch.float32)
            self.begin(1.0, earlier)
        for member, units in self._measured():
            if units is not None:
                part = member.part_of(self._values)
                part.sub_(member.part_of(earlier), alpha=units.beta1)
                kernels.adam_gradients(part, units.second, units.eps)

    def _measured(self) -> Iterator[tuple[_Member, _Units | None]]:
        groups = {p: group for group in self._optimizer.param_groups for p in group["params"]}
        for member in self._members:
            state, group = self._optimizer.state.get(member.parameter), groups[member.parameter]
            if not state:
                yield member, None
                continue
            beta1, beta2 = group["betas"]
            first, second = (
                flat_like(member.view, state[name].to(member.view.dtype))
                for name in ("exp_avg", "exp_avg_sq")
            )
            yield (
                member,
                _Units(first, second, group["eps"] * math.sqrt(1 - beta2 ** group["warmup_steps"]), beta1),
            )
