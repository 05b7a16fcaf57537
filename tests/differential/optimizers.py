"""The optimizers that a seed draws from, by name, and one of the script's own.

Learning rates are such that a dozen steps move the parameters by tenths: a step lost or done twice is then seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class MasterSGD(torch.optim.Optimizer):
    """SGD with momentum for parameters of low precision: weights and momentum are kept in fp32."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float().clone()
                    state["momentum"] = torch.zeros_like(state["master"])
                    state["step"] = 0
                state["step"] += 1
                state["momentum"].mul_(group["momentum"]).add_(p.grad.float())
                state["master"].add_(state["momentum"], alpha=-group["lr"])
                p.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=3.0, lambd=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "master": lambda p: MasterSGD(p, lr=0.05),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4, history_size=3),
}
