"""Two equal models with equal optimizers, one of them fused; and how they train side by side."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import fuse, fuse_optimizer

Make = Callable[[Any], torch.optim.Optimizer]


def step_of(optimizer: torch.optim.Optimizer) -> Any:
    """What fuse_optimizer attached."""
    return fuse._fused[optimizer][0]


def torch_optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [c for _, c in inspect.getmembers(torch.optim, inspect.isclass)]
    return [c for c in found if issubclass(c, torch.optim.Optimizer) and c is not torch.optim.Optimizer]


def shapes_net() -> nn.Module:
    """Small layers that share a block, one that is left as it is, one that is cut."""
    layers = [nn.Linear(6, 37), nn.LayerNorm(37), nn.Tanh(), nn.Linear(37, 1100), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(1100, 600), nn.Tanh(), nn.Linear(600, 130), nn.Linear(130, 3))


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 5), nn.Linear(5, 3))


def net_of_vectors() -> nn.Module:
    """All sizes are multiples of any vector's length."""
    return nn.Sequential(nn.Linear(6, 64, bias=False), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64))


class Twins:
    """`alone` and `fused`: (model, optimizer). make: an optimizer of parameters or groups."""

    def __init__(
        self,
        make: Make,
        net: Callable[[], nn.Module] = small_net,
        dtype: torch.dtype = torch.float32,
        groups: Callable[[nn.Module], Any] = lambda model: list(model.parameters()),
        device: str = "cpu",
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.device = device
        self.models = [net().to(device, dtype) for _ in range(2)]
        self.models[1].load_state_dict(self.models[0].state_dict())
        self.optimizers = [make(groups(model)) for model in self.models]
        fuse_optimizer(self.optimizers[1], **settings)
        self.steps = 0
        self.laid_out = 0  # how often
        self._count_layouts(self.step)

    def _count_layouts(self, step: Any) -> None:
        laid_out = step._laid_out
        newest: Callable[[], Any] = lambda: None  # noqa: E731 (weak: memory that something holds is not moved)

        def counted(optimizer: torch.optim.Optimizer) -> Any:
            nonlocal newest
            layout = laid_out(optimizer)
            self.laid_out += layout is not newest()
            newest = weakref.ref(layout)
            return layout

        step._laid_out = counted

    @property
    def step(self) -> Any:
        """What is attached to the fused one."""
        return step_of(self.optimizers[1])

    @property
    def blocks(self) -> list[Any]:
        """Of the last step; none where the optimizer is left as it is."""
        return [] if self.step.layout is None else list(self.step.layout.blocks)

    def pairs(self) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
        yield from zip(self.models, self.optimizers, strict=True)

    def backward(self, model: nn.Module, create_graph: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(8, 6, generator=generator).to(self.device, self.dtype)
        loss: Tensor = (model(x) - 1).square().mean()
        loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]
        return loss

    def train(
        self, steps: int = 4, set_to_none: bool = True, between: Callable[[nn.Module], None] | None = None
    ) -> None:
        """between: called with each model after its backward."""
        for _ in range(steps):
            for model, optimizer in self.pairs():
                optimizer.zero_grad(set_to_none=set_to_none)
                self.backward(model)
                if between is not None:
                    between(model)
                optimizer.step()
            self.steps += 1

    def check(self, equal: Callable[[Tensor, Tensor], bool] = torch.equal) -> None:
        """Parameters and whole states are equal, bit by bit unless `equal` says otherwise."""
        for (name, one), (_, other) in zip(*(m.named_parameters() for m in self.models), strict=True):
            assert equal(one, other), (
                f"{name}: off by {(one - other).abs().max():.2e} after {self.steps} steps"
            )
        check_alike(*(o.state_dict() for o in self.optimizers), equal=equal)


def check_alike(
    one: Any, other: Any, path: str = "state", equal: Callable[[Tensor, Tensor], bool] = torch.equal
) -> None:
    assert type(one) is type(other), f"{path}: {type(one)} and {type(other)}"
    if isinstance(one, Tensor):
        assert one.shape == other.shape and one.dtype == other.dtype, path
        assert equal(one, other), f"{path}: {one} and {other}"
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for name in one:
            check_alike(one[name], other[name], f"{path}[{name!r}]", equal)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            check_alike(a, b, f"{path}[{place}]", equal)
    else:
        assert one == other, path


def quietly(make: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it returns, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    return made, [str(w.message) for w in caught]
