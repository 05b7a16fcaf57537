"""Fused or not, the result is the same, bit by bit, for every optimizer that torch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import PerParameterError, fuse_optimizer
from tests.core.fused_optimizer.twins import (
    Twins,
    net_of_vectors,
    quietly,
    shapes_net,
    small_net,
    torch_optimizers,
)

OF_WHOLES = {"Adafactor", "LBFGS", "Muon"}  # what they compute for one parameter is not by element
SPARSE_ONLY = {"SparseAdam"}
ELEMENTWISE = [c for c in torch_optimizers() if c.__name__ not in OF_WHOLES | SPARSE_ONLY]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}],
    "Adam": [{"amsgrad": True, "weight_decay": 0.1}, {"maximize": True}, {"lr": torch.tensor(1e-2)}],
    "AdamW": [{"amsgrad": True}],
    "RMSprop": [{"centered": True, "momentum": 0.9}],
    "NAdam": [{"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.1}],
}
CASES = [
    pytest.param(kind, options, id="-".join([kind.__name__, *map(str, options)]))
    for kind in ELEMENTWISE
    for options in [{}, {"foreach": True}, *VARIANTS.get(kind.__name__, [])]
]


def test_there_are_many() -> None:
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Rprop"} <= {c.__name__ for c in ELEMENTWISE}


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_same_bits(kind: type[Any], options: dict[str, Any]) -> None:
    twins = Twins(lambda params: kind(params, **{"lr": 1e-2, **options}))
    twins.train(8)
    twins.check()
    (block,) = twins.blocks
    assert len(block.members) == len(list(twins.models[1].parameters())), "all share a block"


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_same_bits_in_other_dtypes(kind: type[Any], dtype: torch.dtype) -> None:
    """In bfloat16 torch rounds the last elements of a tensor, fewer than a vector has, otherwise than the others."""
    twins = Twins(lambda params: kind(params, lr=1e-2), net_of_vectors, dtype=dtype)
    twins.train(5)
    twins.check()
    assert twins.blocks


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_odd_sizes_in_bfloat16_differ_by_rounding_at_most(kind: type[Any]) -> None:
    twins = Twins(lambda params: kind(params, lr=1e-2), dtype=torch.bfloat16)
    twins.train(5)
    for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
        assert torch.allclose(one, other, rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_large_parameters_are_cut_and_those_between_are_left(kind: type[Any]) -> None:
    twins = Twins(lambda params: kind(params, lr=1e-3), shapes_net)
    twins.train(2)  # later ones find out whether that pays
    twins.check()
    blocks = twins.blocks
    assert sorted(len(b.members) for b in blocks) == [1, 10]
    assert sorted(len(b.flats) for b in blocks) == [1, 2], "1100 x 600 is two blocks"
    assert [tuple(p.shape) for p in twins.step.layout.groups[0][2:]] == [(130, 600)]


def test_without_states_nothing_is_cut_or_copied() -> None:
    """A step that passes over memory once gains nothing from the cache, and less than copies of gradients cost."""
    twins = Twins(lambda params: torch.optim.SGD(params, lr=1e-2), shapes_net)
    twins.train(4)
    twins.check()
    (block,) = twins.blocks
    assert len(block.members) == 10
    block.copied = False  # as it was before the first step, which shows that there are no states
    twins.train(2)
    assert not block.copied and twins.blocks == [block]
    before = [m.grad for m in block.members]
    twins.train(3, set_to_none=False)
    twins.check()
    assert all(m.grad is g for m, g in zip(block.members, before, strict=True))
    end = before[-1].data_ptr() + before[-1].nbytes
    assert end - before[0].data_ptr() == sum(g.nbytes for g in before), (
        "those that are kept lie in order by now"
    )


def has_fused(kind: type[Any]) -> bool:
    try:
        kind([torch.nn.Parameter(torch.ones(1))], fused=True)
    except (TypeError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize("kind", [c for c in ELEMENTWISE if has_fused(c)])
def test_torchs_own_fused_kernels_differ_by_rounding_at_most(kind: type[Any]) -> None:
    """They round the last few elements of a tensor, fewer than a vector has, in another way than the others."""

    def within_rounding(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-5, atol=1e-7)

    twins = Twins(lambda params: kind(params, lr=1e-2, fused=True))
    twins.train(8)
    twins.check(within_rounding)
    assert twins.blocks


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.b = nn.Parameter(torch.randn(2, 2, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.a.abs().sum() + self.b.abs().square().sum()) * x.mean()
        return loss

    def to(self, *_: Any, **__: Any) -> ComplexNet:
        return self


def test_complex_parameters() -> None:
    twins = Twins(lambda params: torch.optim.Adam(params, lr=1e-2), ComplexNet)
    twins.train(4)
    twins.check()
    (block,) = twins.blocks
    assert block.whole.is_complex()


@pytest.mark.parametrize("name", sorted(OF_WHOLES))
def test_those_that_need_wholes_are_stepped_as_they_are(name: str) -> None:
    kind: Any = getattr(torch.optim, name)

    def matrices(model: torch.nn.Module) -> list[Any]:
        return [p for p in model.parameters() if p.dim() == 2]

    made, warned = quietly(lambda: Twins(lambda params: kind(params, lr=1e-3), small_net, groups=matrices))
    assert len([w for w in warned if "does not work on each element by itself" in w]) == 1
    for _ in range(3):
        for model, optimizer in made.pairs():

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                return made.backward(model)

            optimizer.step(closure)
        made.steps += 1
    made.check()
    assert made.blocks == []
    with pytest.raises(PerParameterError, match=name):
        Twins(lambda params: kind(params, lr=1e-3), small_net, groups=matrices, strict=True)


def test_sparse_gradients_are_left_to_their_optimizer() -> None:
    tables = [torch.nn.Embedding(10, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = [torch.optim.SparseAdam(list(t.parameters()), lr=0.1) for t in tables]
    quietly(lambda: fuse_optimizer(optimizers[1]))
    for step in range(3):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor([step, 4])).sum().backward()
            optimizer.step()
    assert torch.equal(tables[0].weight, tables[1].weight)
