"""A step uses foreach=True where blocks are of no use (plain SGD, new gradients), with no other effect."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_core.fused_optimizer import foreach_step
from tests.core.fused_optimizer.twins import Twins, small_net


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, **options)


def operations_of_a_step(twins: Twins) -> list[str]:
    """Of the fused one."""
    twins.optimizers[1].zero_grad()
    twins.backward(twins.models[1])
    with Counting() as counting:
        twins.optimizers[1].step()
    return counting.names


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}])
def test_same_bits_with_fewer_operations(options: dict[str, Any]) -> None:
    twins = Twins(lambda params: sgd(params, **options), small_net)
    twins.train(8)
    twins.check()
    names = operations_of_a_step(twins)
    assert any(name.startswith("aten::_foreach_add") for name in names)
    assert len(names) < len(list(twins.models[1].parameters()))
    assert twins.optimizers[1].param_groups[0]["foreach"] is None


def test_a_script_that_chose_otherwise_gets_what_it_chose() -> None:
    twins = Twins(lambda params: sgd(params, foreach=False), small_net)
    twins.train(4)
    assert not any(name.startswith("aten::_foreach_") for name in operations_of_a_step(twins))


def test_an_optimizer_whose_foreach_gives_other_bits_is_left_as_it_is() -> None:
    class Unlike(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad, alpha=-2.0 if group["foreach"] else -1.0)

    twins = Twins(lambda params: Unlike(params, lr=1e-2), small_net)
    twins.train(6)
    twins.check()


def test_a_step_that_raises_leaves_the_option_open(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(sgd, small_net)
    twins.train(4)
    optimizer = twins.optimizers[1]
    optimizer.zero_grad()
    twins.backward(twins.models[1])

    def out_of_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch, "_foreach_add_", out_of_memory)
        optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["foreach"] is None
    optimizer.step()
    assert optimizer.param_groups[0]["foreach"] is None
    twins.optimizers[0].zero_grad()
    twins.backward(twins.models[0])
    twins.optimizers[0].step()
    twins.check()


def test_an_optimizer_with_torchs_own_kernels_keeps_them() -> None:
    twins = Twins(lambda params: sgd(params, fused=True), small_net)
    twins.train(6)
    twins.check()
    names = operations_of_a_step(twins)
    assert any("fused_sgd" in name for name in names) and not any("foreach_add" in name for name in names)


def test_a_scaler_that_comes_later() -> None:
    """It hands its scale to optimizers with torch's own kernels, which foreach does not take."""
    twins = Twins(lambda params: sgd(params, fused=True), small_net)
    twins.train(5)
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for _ in range(3):
        for (model, optimizer), scaler in zip(twins.pairs(), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        twins.check()


def test_a_group_of_large_parameters_takes_no_memory_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreach_step, "MOST_ELEMENTS", 10)
    twins = Twins(lambda params: sgd(params, weight_decay=0.1), small_net)
    twins.train(6)
    twins.check()
    assert not any("foreach" in name for name in operations_of_a_step(twins))
