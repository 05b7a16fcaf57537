"""Gradients under a fused optimizer: absent, kept, sparse, of odd memory, and what optimizers write to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer.flat_memory import may_move
from tests.core.fused_optimizer.fused_makes import MAKES, adam, momentum
from tests.core.fused_optimizer.twins import Twins, shapes_net, small_net

# -- gradients


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(make: Any, set_to_none: bool) -> None:
    twins = Twins(make)
    twins.train(5, set_to_none)
    twins.check()
    twins.train(2, not set_to_none)
    twins.check()
    for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_gradients_that_a_script_kept_stay_as_they_were() -> None:
    twins = Twins(momentum)
    twins.train(4, set_to_none=False)
    kept = [p.grad for p in twins.models[1].parameters()]
    values = [g.clone() for g in kept]
    twins.train(3, set_to_none=True)
    assert all(map(torch.equal, kept, values))
    twins.check()


def test_the_memory_of_gradients_is_not_kept() -> None:
    twins = Twins(adam, shapes_net)
    twins.train(3)
    gradients = [p.grad for p in twins.models[1].parameters()]
    twins.optimizers[1].zero_grad()
    assert all(g is not None and may_move(g) for g in gradients), "nothing else looks at their memory"


@pytest.mark.parametrize("make", MAKES)
def test_a_parameter_without_gradient_stays_as_it_is(make: Any) -> None:
    """Never as if it were zero: momentum and decay would move it, and its steps would count."""
    patterns = [{2, 3}] * 4 + [set(), {0}, {1}, {0, 7}] + [set()] * 3 + [set(range(8)), {4}]

    def remove(model: nn.Module) -> None:
        for number in patterns[twins.steps]:
            list(model.parameters())[number].grad = None

    twins = Twins(make)
    for _ in patterns:
        twins.train(1, between=remove)
        twins.check()
    if make is adam:
        states = twins.optimizers[1].state_dict()["state"]
        assert {number: int(state["step"]) for number, state in states.items()} == {
            number: sum(number not in absent for absent in patterns) for number in range(8)
        }


def test_after_a_while_without_the_same_gradients_the_others_share_a_block_again() -> None:
    def remove(model: nn.Module) -> None:
        next(iter(model.parameters())).grad = None

    twins = Twins(adam)
    twins.train(1)
    twins.train(4, between=remove)
    twins.check()
    assert [len(b.members) for b in twins.blocks] == [7]
    assert twins.laid_out == 2


def test_a_pattern_that_changes_with_every_step_is_not_laid_out_every_time() -> None:
    def remove(model: nn.Module) -> None:
        list(model.parameters())[twins.steps % 8].grad = None

    twins = Twins(adam)
    twins.train(12, between=remove)
    twins.check()
    assert twins.laid_out == 1


def test_gradients_of_odd_memory() -> None:
    """Expanded, transposed, and of channels_last weights."""

    def oddly(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad = torch.full((1,), 0.25).expand(p.shape) if p.dim() == 1 else p.grad.t().contiguous().t()

    twins = Twins(adam)
    twins.train(3, between=oddly)
    twins.check()


def test_channels_last() -> None:
    class Convolving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 2))
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

        def forward(self, x: Tensor) -> Tensor:
            image = x.reshape(8, 2, 1, 3).contiguous(memory_format=torch.channels_last)
            made: Tensor = self.layers(nn.functional.pad(image, (0, 0, 1, 1)))
            return made

    twins = Twins(adam, Convolving)
    twins.train(4)
    twins.check()
    assert not next(twins.models[1].parameters()).is_contiguous()
    assert len(twins.blocks) == 1


# -- precision and closures


@pytest.mark.parametrize("fused_kernel", [False, True])
def test_grad_scaler_skips_steps_with_infinite_gradients(fused_kernel: bool) -> None:
    twins = Twins(lambda params: torch.optim.Adam(params, lr=1e-2, fused=fused_kernel))
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    for step in range(7):
        for (model, optimizer), scaler in zip(twins.pairs(), scalers, strict=True):
            optimizer.zero_grad()
            x = torch.full((2, 6), float("inf") if step == 3 else 0.1 * step)
            scaler.scale(model(x).square().sum()).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].state_dict() == scalers[1].state_dict()
    close: Any = torch.allclose if fused_kernel else torch.equal
    twins.check(close)
    assert {float(s["step"]) for s in twins.optimizers[1].state.values()} == {6.0}


def test_gradients_that_become_sparse() -> None:
    """After dense ones that were stepped without states."""
    twins = Twins(lambda params: torch.optim.SGD(params, lr=1e-2), small_net)
    twins.train(3)

    def sparse(model: nn.Module) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_sparse()

    twins.train(2, between=sparse)
    twins.check()


class WithEmbedding(nn.Module):
    """Its embedding's gradient is dense, absent, or sparse, as `way` says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.embedding = nn.Embedding(7, 3)
        self.way = "dense"

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "absent":
            return self.linear(x)  # type: ignore[no-any-return]
        self.embedding.sparse = self.way == "sparse"
        return self.linear(x) + self.embedding(torch.arange(8) % 7)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["dense", "absent"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_an_embedding_whose_gradients_become_sparse(kind: Any, way: str) -> None:
    """torch writes beyond a parameter's memory where it adds sparse gradients to one that lies within another's."""
    twins = Twins(lambda params: kind(params, lr=1e-2), WithEmbedding)
    for now in (way, "sparse", way, "sparse", "sparse"):
        for model in twins.models:
            model.way = now  # type: ignore[assignment]
        twins.train(3)
        twins.check()
    embedding = twins.models[1].embedding
    assert all(p.storage_offset() == 0 for p in embedding.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_an_optimizer_writes_to_gradients_is_there_afterwards(set_to_none: bool) -> None:
    """As Adan of pytorch-optimizer, which turns their sign."""

    class Turns(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state.setdefault("sum", torch.zeros_like(parameter)).add_(parameter.grad)
                    parameter.add_(parameter.grad, alpha=-group["lr"])
                    parameter.grad.neg_()

    twins = Twins(Turns)
    for _ in range(4):
        twins.train(1, set_to_none=set_to_none)
        twins.check()
        for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
            assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)
    assert twins.blocks


def test_what_torchs_own_kernels_unscale_is_there_afterwards() -> None:
    """They write to gradients without a trace in their version."""
    twins = Twins(lambda params: torch.optim.Adam(params, lr=1e-3, fused=True))
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for _ in range(4):
        for (model, optimizer), scaler in zip(twins.pairs(), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert twins.blocks
    for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-7)
