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

from bagua_core import kernels
from bagua_core.kernels.interface import VALUE_DTYPES

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
        if steps > group["warmup_steps"] and all(map(self._has_kernel, parameters)):
            self._move_at_once(group, parameters, steps)
            return 0
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

    def _has_kernel(self, parameter: Tensor) -> bool:
        """A GPU has enough bandwidth for torch's many passes, and would pay for many launches."""
        return parameter.device.type == "cpu" and parameter.dtype in VALUE_DTYPES

    def _move_at_once(self, group: dict[str, Any], parameters: Sequence[Tensor], steps: int) -> None:
        """The same after the warm-up, in one pass over memory."""
        beta1, beta2 = group["betas"]
        correction = math.sqrt(1 - beta2 ** group["warmup_steps"])
        for parameter in parameters:
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            tensors = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
            flat = [flat_like(parameter, tensor.to(parameter.dtype)) for tensor in tensors]
            kernels.adam_update(
                *flat,
                share=1 - beta1,
                weight_decay=group["weight_decay"],
                eps=group["eps"] * correction,
                rate=float(group["lr"]) * correction / (1 - beta1**steps),
            )
            for tensor, found in ((parameter, flat[0]), (state["exp_avg"], flat[2])):
                if found.data_ptr() != tensor.data_ptr():
                    tensor.copy_(found.as_strided(tensor.shape, _dense_strides(parameter)))
                torch.autograd.graph.increment_version(tensor)

    def _rest(self, parameters: Sequence[Tensor]) -> int:
        """Elements without a second moment are divided by infinity from now on."""
        for parameter in parameters:
            state = self.state[parameter]
            none = state["exp_avg_sq"] == 0
            state["resting"] = int(none.sum())
            state["exp_avg_sq"].masked_fill_(none, math.inf)
        return sum(self.state[p]["resting"] for p in parameters)


def flat_like(one: Tensor, other: Tensor) -> Tensor:
    """[elements] of `other`, in the order in which they lie in the memory of `one`, which has its shape; a view where
    both lie alike."""
    strides = _dense_strides(one)
    if other.stride() != strides:
        other = torch.empty_strided(other.shape, strides, dtype=other.dtype, device=other.device).copy_(other)
    return other.as_strided((other.numel(),), (1,), other.storage_offset())


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Its own if it has no gaps, else those of a contiguous one: as buckets lay gradients out."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


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
