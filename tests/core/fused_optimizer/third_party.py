"""Optimizers that torch does not have: some work on each element by itself, others need parameters as wholes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Written(torch.optim.Optimizer):
    """A step per parameter: `move` changes it in place."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group)
        return loss

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Lion(Written):
    """By signs; replaces its state by a new tensor, and counts steps in a Python number."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.get("momentum", torch.zeros_like(p))
        p.add_((0.9 * momentum + 0.1 * g).sign(), alpha=-group["lr"])
        state["momentum"] = 0.99 * momentum + 0.01 * g
        state["taken"] = state.get("taken", 0) + 1


class Remembers(Written):
    """What parameters were before the step: copied into one state, cloned as another; and their signs."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        was = state.setdefault("was", torch.zeros_like(p))
        before = state.get("before", torch.zeros_like(p))
        signs = state.get("signs", torch.zeros_like(p, dtype=torch.int32))
        update = g + 0.1 * (p - was) + 0.01 * (p - before) + 0.001 * signs
        was.copy_(p)
        state["before"] = p.clone()
        state["signs"] = (p > 0).to(torch.int32).clone()
        p.add_(update, alpha=-group["lr"])


class DataWriter(Written):
    """As many do, gives p.data new memory, and keeps a number of its own in the group and on itself."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.calls = 0

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.data = p.data - group["lr"] / (1 + 0.1 * self.calls) * g

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        return super().step(closure)


class KeepsForAll(Written):
    """A count and a tensor for all parameters together, in the state under names of their own."""

    def step(self, closure: Any = None) -> Any:
        together = self.state["together"]
        together["seen"] = together.get("seen", 0) + 1
        self.state["rate"] = self.state.get("rate", torch.ones(())) * 0.9
        return super().step(closure)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.addcmul_(g, self.state["rate"], value=-group["lr"] / self.state["together"]["seen"])


class Lamb(Written):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.01)
        update = state["m"] / (state["v"].sqrt() + 1e-6)
        norm, of_update = p.norm(), update.norm()
        trust = torch.where((norm > 0) & (of_update > 0), norm / of_update, torch.ones_like(norm))
        p.sub_(update * trust * group["lr"])


class Lars(Written):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        local = 0.001 * p.norm() / (g.norm() + 1e-9) if p.norm() > 0 else 1.0
        p.sub_(g * local * group["lr"])


class ClipsEach(Written):
    """Plain descent, until a gradient is large."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * min(1.0, 10.0 / (float(g.norm()) + 1e-12)) * group["lr"])


class FactorsLarge(Written):
    """A second moment by rows and columns, for matrices of 128 and more only."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        squares = g * g + 1e-12
        if p.dim() == 2 and min(p.shape) >= 128:
            rows, columns = squares.mean(1, keepdim=True), squares.mean(0, keepdim=True)
            squares = rows * columns / rows.mean()
        state.setdefault("v", torch.zeros_like(p)).lerp_(squares, 0.1)
        p.sub_(g / state["v"].sqrt() * group["lr"])


class Quantizes(Written):
    """Momentum in 8 bits with a scale for every 256 elements, for parameters of 4096 and more only."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momentum = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        if p.numel() >= 4096:
            flat = momentum.view(-1)
            for part in flat.split(256):
                scale = part.abs().max() / 127 + 1e-30
                part.copy_((part / scale).round() * scale)
        p.sub_(momentum * group["lr"])


class StartsLate(Written):
    """Shampoo-like: plain descent at first, then each matrix is preconditioned. after: steps."""

    def __init__(self, params: Any, lr: float = 1e-2, after: int = 20) -> None:
        super().__init__(params, lr, after=after)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["taken"] = state.get("taken", 0) + 1
        if state["taken"] > group["after"] and p.dim() == 2:
            g = g / (g @ g.T).diagonal().mean().sqrt().clamp_min(1e-12)
        p.sub_(g * group["lr"])


class KeepsList(Written):
    """Steps on a list of its own, whatever the groups say."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.mine:
            if p.grad is not None:
                p.sub_(p.grad / (math.sqrt(p.numel()) + 1))


class Noisy(Written):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * group["lr"] + 1e-3 * torch.randn_like(p))


class KeepsSeveral(Written):
    """Several momenta in one container of each parameter's state."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        momenta = state.setdefault("momenta", {0.5: torch.zeros_like(p), 0.9: torch.zeros_like(p)})
        for beta, momentum in momenta.items():
            momentum.mul_(beta).add_(g)
            p.sub_(momentum * group["lr"])


class RoundsAtRandom(Written):
    """Parameters of 16 bits by stochastic rounding, others plainly."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        update = g * group["lr"]
        if p.dtype is torch.bfloat16:
            update = update + (torch.rand_like(p) - 0.5) * p.abs() * 2**-8
        p.sub_(update)


class MatricesOtherwise(Written):
    """Groups with use_matrices step matrices by their spectral norm, as Muon's users mix it with Adam."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, use_matrices=False)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if group["use_matrices"] and p.dim() == 2:
            g = g / (torch.linalg.matrix_norm(g, 2) + 1e-12)
        p.sub_(g * group["lr"])


ELEMENTWISE = [Lion, Remembers, DataWriter, KeepsForAll]


class LambForAll(Lamb):
    """With a count for all parameters together."""

    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.01 / self.state["k"]
        return super().step(closure)


OF_WHOLES = [
    LambForAll,
    Lamb,
    Lars,
    ClipsEach,
    FactorsLarge,
    Quantizes,
    StartsLate,
    KeepsList,
    KeepsSeveral,
    Noisy,
]
