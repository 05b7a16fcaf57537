"""Implements Adam with a second moment that is frozen after a warm-up; from then on steps are linear in the gradient.

Owns the arithmetic of the optimizer, and which elements are still late. Knows no ranks: the algorithm in qadam.py reads
the moments from here, and the optimizer works with any other algorithm, or alone.

An element is late while its second moment is no reliable estimate: at the end of the warm-up it has had fewer than
LEAST_GRADIENTS gradients that were not zero. Rows of an embedding that no sample used so far are late, and so is
whatever a zero input or a dead unit kept at zero. A late element is updated by plain Adam, its second moment included,
until it has had enough gradients; then its second moment is frozen too.

Elements are frozen at the begin of the step after the one that decides it. Their number is on its way to the host
meanwhile, so the host waits for no device: the step has waited for its gradients anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bagua_core import kernels
from bagua_core.communication.devices import device_order
from bagua_core.communication.devices.device_order import Moment
from bagua_core.kernels.interface import VALUE_DTYPES

DEFAULT_WARMUP_STEPS = 100

# A mean of 32 squares is off by a quarter (one standard deviation, Gaussian gradients), a step by an eighth.
LEAST_GRADIENTS = 32
# Counting late elements takes a pass over memory, and the layout of what is exchanged changes with it.
FREEZE_EVERY = 16  # steps


@dataclass(frozen=True, slots=True)
class _Count:
    """The number of elements that will be late after a parameter's step number `steps`, at `place` of `host`, which may
    be read when `arrived` is past."""

    steps: int
    host: Tensor
    place: int
    arrived: Moment


class QAdamOptimizer(torch.optim.Optimizer):
    """Steps exactly as Adam in the first `warmup_steps` steps of a parameter, with `weight_decay` added to the
    gradient.

    From then on the second moment stays as it is, and so does its bias correction, for all elements that are not late
    (see the top of this file); all else goes on.

    state_dict is Adam's with two more entries for each parameter: `late`, the number of late elements, from the first
    step after the warm-up on; and `seen`, as long as there are any: how many gradients other than zero each element has
    had, infinite for one whose second moment is frozen. A state_dict of Adam is accepted.

    params: real parameters, or groups of them.
    lr, betas, eps, weight_decay: as in torch's Adam.
    warmup_steps: steps of a parameter before its second moment is frozen.
    Raises ValueError for a value out of range and for complex parameters.
    """

    loads = 0
    """How often a state was loaded into this optimizer."""

    freezes = 0
    """How often the set of late elements may have changed since the state was loaded."""

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
        self._counts: dict[Tensor, _Count] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters, as torch's Optimizer does. Raises ValueError for a value out of range and for
        complex parameters."""
        _check({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.is_complex():
                raise ValueError(f"a parameter is {parameter.dtype}; QAdam takes real ones only")

    def is_warm(self, parameters: Sequence[Tensor]) -> bool:
        """Tells whether one of `parameters` has taken a step after the warm-up.

        One is enough: a parameter that is still in its warm-up, as one that was frozen meanwhile or is rarely used, is
        late as a whole.
        """
        limits = {p: group["warmup_steps"] for group in self.param_groups for p in group["params"]}
        return any(
            self._has_warmed_up(p) and int(self.state[p]["step"]) >= limits[p]
            for p in parameters
            if p in limits
        )

    def _has_warmed_up(self, parameter: Tensor) -> bool:
        """Tells whether the parameter's second moment is frozen, but for its late elements."""
        return "late" in self.state.get(parameter, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters that have a gradient. Returns what `closure` returned; None without one.

        closure: computes the loss anew, and its gradients. Raises ValueError for gradients that are not dense.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        counted: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for steps, parameters in self._by_steps(group).items():
                counted |= self._move(group, parameters, steps)
        self._send_counts(counted)
        return loss

    def late_elements(self, parameter: Tensor) -> Tensor | None:
        """Returns a mask of the parameter's shape that is true where an element is late; None: no element is.

        All elements of a parameter that has not been stepped, or is in its warm-up, are late.
        """
        if not self._has_warmed_up(parameter):
            return torch.ones_like(parameter, dtype=torch.bool, memory_format=torch.preserve_format)
        state = self.state[parameter]
        return state["seen"].isfinite() if state["late"] else None

    def late_count(self, parameter: Tensor) -> int:
        """Returns the number of elements of the parameter that are late."""
        return int(self.state[parameter]["late"]) if self._has_warmed_up(parameter) else parameter.numel()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._counts = {}
        for of_parameter in self.state.values():
            count = of_parameter.get("step")
            if isinstance(count, Tensor) and count.dtype.itemsize < 4:  # which stays at 256, or at 2048
                of_parameter["step"] = count.float()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this optimizer or of torch's Adam. An element of a state of Adam counts as one that had a
        gradient in each step, or in none if its second moment is 0. Raises ValueError for a state of other groups."""
        super().load_state_dict(state_dict)
        self.loads += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state.get(parameter)
                if state and "seen" not in state and "late" not in state:  # of another Adam
                    counted = min(int(state["step"]), LEAST_GRADIENTS)
                    state["seen"] = (state["exp_avg_sq"] != 0).to(parameter.dtype).mul_(counted)
                    if int(state["step"]) >= group["warmup_steps"]:
                        self._freeze(group, parameter)

    def _by_steps(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """Returns the parameters that have a gradient, by how many steps they have taken, this one included."""
        found: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if parameter.grad.layout is not torch.strided:
                raise ValueError(f"QAdam takes dense gradients only, not {parameter.grad.layout}")
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                # of the parameter's dtype, to which load_state_dict converts it
                state["seen"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            elif "seen" in state:
                after = int(state["step"]) - group["warmup_steps"]
                if after >= 0 and ("late" not in state or after % FREEZE_EVERY == 0):
                    self._freeze(group, parameter)
            state["step"] += 1
            found.setdefault(int(state["step"]), []).append(parameter)
        return found

    def _move(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> dict[Tensor, Tensor]:
        """Steps `parameters`. Returns how many elements will be late, by parameter, where the next step freezes
        some."""
        after = steps - group["warmup_steps"]
        if after <= 0:
            self._move_as_adam(group, parameters, steps)
            for parameter in parameters:
                self.state[parameter]["seen"].add_(parameter.grad != 0)
            candidates = parameters
        else:
            candidates = [p for p in parameters if self.state[p]["late"]]
            frozen = [p for p in parameters if not self.state[p]["late"]]
            for parameter in candidates:
                self._move_with_late(group, parameter, steps)
            if all(map(self._has_kernel, frozen)):
                self._move_at_once(group, frozen, steps)
            else:
                self._move_as_adam(group, frozen, steps)
        if after < 0 or after % FREEZE_EVERY:
            return {}
        return {p: (self.state[p]["seen"].isfinite() & ~self._ready(group, p)).sum() for p in candidates}

    def _move_as_adam(self, group: dict[str, Any], parameters: list[Tensor], steps: int) -> None:
        """Takes Adam's step, in which the second moment changes only during the warm-up."""
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
        scales: Any = torch._foreach_sqrt(seconds)
        torch._foreach_div_(scales, math.sqrt(1 - beta2**warm))
        torch._foreach_add_(scales, group["eps"])
        torch._foreach_addcdiv_(parameters, firsts, scales, -group["lr"] / (1 - beta1**steps))

    def _move_with_late(self, group: dict[str, Any], parameter: Tensor, steps: int) -> None:
        """Takes the step of a parameter that has late elements, after the warm-up."""
        beta1, beta2 = group["betas"]
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        first, second, seen = state["exp_avg"], state["exp_avg_sq"], state["seen"]
        late = seen.isfinite()
        seen.add_(gradient != 0)
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        first.lerp_(gradient, 1 - beta1)
        updated = (second * beta2).addcmul_(gradient, gradient, value=1 - beta2)
        second.copy_(torch.where(late, updated, second))
        scale = second.sqrt()
        corrections = (math.sqrt(1 - beta2**s) for s in (steps, group["warmup_steps"]))
        of_late, of_frozen = (scale.new_full((), c) for c in corrections)
        scale.div_(torch.where(late, of_late, of_frozen)).add_(group["eps"])
        parameter.addcdiv_(first, scale, value=-group["lr"] / (1 - beta1**steps))

    def _ready(self, group: dict[str, Any], parameter: Tensor) -> Tensor:
        """Returns a mask of the late elements that have had enough gradients."""
        second, seen = self.state[parameter]["exp_avg_sq"], self.state[parameter]["seen"]
        enough = min(LEAST_GRADIENTS, group["warmup_steps"])
        # zero although there were gradients: it was too small for its dtype
        ready: Tensor = seen.isfinite() & (seen >= enough) & (second > 0)
        return ready

    def _freeze(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Freezes the second moment of late elements that have had enough gradients."""
        state, ready, beta2 = self.state[parameter], self._ready(group, parameter), group["betas"][1]
        second, seen = state["exp_avg_sq"], state["seen"]
        # the bias correction of frozen elements is that of the warm-up's last step
        steps = max(int(state["step"]), group["warmup_steps"])
        factor = (1 - beta2 ** group["warmup_steps"]) / (1 - beta2**steps)
        if factor != 1:
            second.copy_(torch.where(ready, second * factor, second))
        seen.masked_fill_(ready, math.inf)
        self.freezes += 1
        state["late"] = self._count_of(parameter)
        if not state["late"]:
            del state["seen"]

    def _send_counts(self, counts: dict[Tensor, Tensor]) -> None:
        """Sends the counts to the host while the device goes on with what follows."""
        for device in dict.fromkeys(parameter.device for parameter in counts):
            there = [p for p in counts if p.device == device]
            sent = torch.stack([counts[p] for p in there])
            order = device_order.order_of([sent])
            host = order.copy_to_host(sent)
            arrived = order.now()
            for place, parameter in enumerate(there):
                self._counts[parameter] = _Count(int(self.state[parameter]["step"]), host, place, arrived)

    def _count_of(self, parameter: Tensor) -> int:
        """Returns the number of late elements of a parameter that is frozen in part."""
        count, state = self._counts.pop(parameter, None), self.state[parameter]
        if count is None or count.steps != int(state["step"]):  # the state was loaded or set back since
            return int(state["seen"].isfinite().sum())
        if not count.arrived.is_past():
            count.arrived.wait(lambda: None)
        return int(count.host[count.place])

    def _has_kernel(self, parameter: Tensor) -> bool:
        """Tells whether one kernel takes the step. A GPU has enough bandwidth for torch's many passes, and would pay
        for many launches."""
        return parameter.device.type == "cpu" and parameter.dtype in VALUE_DTYPES

    def _move_at_once(self, group: dict[str, Any], parameters: Sequence[Tensor], steps: int) -> None:
        """Takes the step of `_move_as_adam` after the warm-up in one pass over memory."""
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


def flat_like(one: Tensor, other: Tensor) -> Tensor:
    """Returns `other` as [elements], in the order of the memory of `one`, which has its shape; a view where both lie
    alike."""
    strides = _dense_strides(one)
    if other.stride() != strides:
        other = torch.empty_strided(other.shape, strides, dtype=other.dtype, device=other.device).copy_(other)
    return other.as_strided((other.numel(),), (1,), other.storage_offset())


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the tensor's own strides if it has no gaps, else those of a contiguous one: as buckets lay gradients
    out."""
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


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
