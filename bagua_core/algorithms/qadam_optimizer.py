"""Adam whose second moment rests after a warm-up: its steps are linear in the gradient then, which can be compressed.

Knows nothing of ranks: the algorithm in qadam.py reads its moments, and any other algorithm, or none, serves as well.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

DEFAULT_WARMUP_STEPS = 100


class QAdamOptimizer(torch.optim.Optimizer):
    """In the first `warmup_steps` steps of a parameter exactly Adam, with `weight_decay` added to the gradient. From
    then on the second moment stays as it is, and so does its bias correction; all else goes on.

    An element whose gradient was zero throughout the warm-up has no second moment to be measured by, and stays as it
    is: its exp_avg_sq becomes infinite, with a warning that says how many there are. state_dict is as Adam's.
    Raises ValueError.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        warmup_steps: int = DEFAULT_WARMUP_STEPS,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                raise ValueError(f"a parameter is {parameter.dtype}; QAdam takes real ones only")

    def is_warm(self, parameters: Sequence[Tensor]) -> bool:
        """Whether the warm-up is over for all of them that have been stepped, one at least."""
        limits = {p: group["warmup_steps"] for group in self.param_groups for p in group["params"]}
        stepped = [p for p in parameters if self.state.get(p)]
        return bool(stepped) and all(int(self.state[p]["step"]) >= limits[p] for p in stepped)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        resting = 0
        for group in self.param_groups:
            for steps, parameters in self._by_steps(group).items():
                resting += self._move(group, parameters, steps)
        if resting:
            total = sum(p.numel() for group in self.param_groups for p in group["params"])
            warnings.warn(
                f"{resting} of {total} parameters had no gradient in the warm-up and will not be trained from now on; "
                "if they should, make warmup_steps larger",
                stacklevel=2,
            )
        return loss

    def _by_steps(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Those that have a gradient, by how many steps they have taken, this one included."""
        found: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError(f"QAdam takes dense gradients only, not {parameter.grad.layout}")
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["step"] += 1
            found.setdefault(int(state["step"]), []).append(parameter)
        return found

    def _move(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> int:
        """Returns how many elements rest from now on."""
        beta1, beta2 = group["betas"]
        warm = min(steps, group["warmup_steps"])
        gradients: Any = [p.grad for p in parameters]
        firsts = [self.state[p]["exp_avg"] for p in parameters]
        seconds = [self.state[p]["exp_avg_sq"] for p in parameters]
        if group["weight_decay"]:
            gradients = torch._foreach_add(gradients, parameters, alpha=group["weight_decay"])
        torch._foreach_lerp_(firsts, gradients, 1 - beta1)
        if steps <= group["warmup_steps"]:
            torch._foreach_mul_(seconds, beta2)
            torch._foreach_addcmul_(seconds, gradients, gradients, 1 - beta2)
        resting = self._rest(parameters) if steps == group["warmup_steps"] else 0
        scales: Any = torch._foreach_sqrt(seconds)
        torch._foreach_div_(scales, math.sqrt(1 - beta2**warm))
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_addcdiv_(parameters, firsts, scales, -group["lr"] / (1 - beta1**steps))
        return resting

    def _rest(self, parameters: Sequence[Tensor]) -> int:
        """Elements without a second moment are divided by infinity from now on."""
        for parameter in parameters:
            state = self.state[parameter]
            none = state["exp_avg_sq"] == 0
            state["resting"] = int(none.sum())
            state["exp_avg_sq"].masked_fill_(none, math.inf)
        return sum(self.state[p]["resting"] for p in parameters)


def _check(options: dict[str, Any]) -> None:
    beta1, beta2 = options["betas"]
    for name, value, fits, wanted in [
        ("lr", options["lr"], options["lr"] >= 0, "0 or more"),
        ("warmup_steps", options["warmup_steps"], options["warmup_steps"] >= 1, "1 or more"),
        ("betas[0]", beta1, 0 <= beta1 < 1, "at least 0 and below 1"),
        ("betas[1]", beta2, 0 <= beta2 < 1, "at least 0 and below 1"),
        ("eps", options["eps"], options["eps"] > 0, "above 0"),
        ("weight_decay", options["weight_decay"], options["weight_decay"] >= 0, "0 or more"),
    ]:
        if not fits:
            raise ValueError(f"QAdamOptimizer: {name}={value}; it must be {wanted}")
