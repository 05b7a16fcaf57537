"""Computes Nesterov's step of an outer optimizer, which takes what a round has changed as its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# What DiLoCo's authors found best over a wide range of models.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class OuterStep:
    """The settings of an outer step. Raises ValueError if lr is not positive or momentum is not in [0, 1)."""

    lr: float = OUTER_LR
    momentum: float = OUTER_MOMENTUM

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"outer_lr={self.lr} must be positive")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"outer_momentum={self.momentum} must be at least 0 and below 1")

    @property
    def described(self) -> str:
        return f"nesterov {self.lr:g} {self.momentum:g}"

    def take(
        self,
        anchors: Sequence[torch.Tensor],
        momentum: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        next_momentum: Sequence[torch.Tensor],
    ) -> None:
        """Takes a step, by which `gradients` become the next anchors, in place. anchors and momentum are read only."""
        for anchor, before, gradient, following in zip(
            anchors, momentum, gradients, next_momentum, strict=True
        ):
            torch.mul(before, self.momentum, out=following).add_(gradient)
            gradient.add_(following, alpha=self.momentum)
            torch.sub(anchor, gradient, alpha=self.lr, out=gradient)
