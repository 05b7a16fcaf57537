"""Every optimizer of a package that others wrote comes out as without fusing, in blocks or left as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn

from tests.core.fused_optimizer.twins import Twins, small_net

STEPS = 12  # one moves nothing before the eleventh
# Of how far parameters went. Some sum over all parameters, in another order where they lie in blocks, and D-Adaptation
# makes much of a rounding; what is taken for a whole and is none is off by far more.
TOLERANCE = 1e-3

_SHARING = """
accsgd adabelief adabound adadelta adago adai adam adamax adamc adamg adamod adams adamuon adamw adamwsn
adan adapnm adasmooth ademamix adopt alig ano apollo avagrad bcos dadaptadagrad dadaptadan dadaptlion
dadaptsgd diffgrad dualadam emolynx emonavi exadam fira focus ftrl galore grams grokfastadamw kate laprop
lion madgrad msvag muon muonclip nadam normuon padam pid pnm qhm radam rmsprop schedulefreeadamw
schedulefreeradam schedulefreesgd sgd sgdw signsgd simplifiedademamix srmm tiger vsgd yogi
"""
_IN_CI = (
    "adabelief adan lion schedulefreeadamw adopt ademamix emonavi lamb lars shampoo soap nero came adafactor"
)
IN_BLOCKS, SHORT = frozenset(_SHARING.split()), frozenset(_IN_CI.split())


def _matrices_and_vectors(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim == 2], "use_muon": True},
        {"params": [p for p in parameters if p.ndim != 2], "use_muon": False},
    ]


def _matrices(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.ndim == 2]


@dataclass(frozen=True)
class Needs:
    """What an optimizer asks for beyond a list of parameters and their gradients."""

    arguments: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] = lambda model: list(model.parameters())
    closure: bool = False
    second_order: bool = False
    dtype: torch.dtype = torch.float64


_MUON = Needs(groups=_matrices_and_vectors)
NEEDS = {
    **dict.fromkeys(("adago", "adamuon", "muon", "muonclip", "normuon"), _MUON),
    **dict.fromkeys(("adahessian", "sophiah"), Needs(second_order=True)),
    "alig": Needs(closure=True),
    "lbfgs": Needs({"lr": 0.1}, closure=True),  # with 1, its default, rounding decides whether it diverges
    "fadam": Needs(dtype=torch.float32),
    "ranger21": Needs({"num_iterations": 100}),
    "spectralsphere": Needs(groups=_matrices),
}
NOT_TRIED = {
    **dict.fromkeys(("adalomo", "lomo"), "takes the model and steps within backward"),
    "adammini": "takes the model",
    "bsam": "its own step raises, in version 4.1",
    "demo": "needs another package, einops",
    "distributedmuon": "needs a process group",
}


def _cases() -> list[Any]:
    names = sorted(pytorch_optimizer.get_supported_optimizers())
    assert set(NEEDS) | set(NOT_TRIED) | IN_BLOCKS | SHORT <= set(names)
    return [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.long)
        for name in names
        if name not in NOT_TRIED
    ]


def _trained(name: str, **settings: Any) -> tuple[Twins, list[Tensor]]:
    """Twins after some steps, and where their parameters were before."""
    kind, needs = pytorch_optimizer.load_optimizer(name), NEEDS.get(name, Needs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one is left as it is, and what the package itself says
        twins = Twins(
            lambda made: kind(made, **needs.arguments), small_net, needs.dtype, needs.groups, **settings
        )
        before = [p.detach().clone() for p in twins.models[0].parameters()]
        for step in range(STEPS):
            for model, optimizer in twins.pairs():
                torch.manual_seed(step)  # some draw noise

                def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    with torch.enable_grad():  # not all see to that themselves
                        return twins.backward(model, create_graph=needs.second_order)

                if needs.closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
            twins.steps += 1
    return twins, before


def _check_parameters(twins: Twins, before: list[Tensor]) -> None:
    moved = max(
        float((p.detach() - was).abs().max())
        for p, was in zip(twins.models[0].parameters(), before, strict=True)
    )
    assert moved > 0
    for (label, one), (_, other) in zip(*(m.named_parameters() for m in twins.models), strict=True):
        off = float((one - other).detach().abs().max())
        assert off <= TOLERANCE * moved, f"{label}: off by {off:.2e} of {moved:.2e}"


@pytest.mark.parametrize("name", _cases())
def test_it_comes_out_as_without(name: str) -> None:
    twins, before = _trained(name)
    _check_parameters(twins, before)
    alone, fused = (optimizer.state_dict().get("state", {}) for optimizer in twins.optimizers)
    assert list(alone) == list(fused)
    for key, kept in alone.items():
        assert not isinstance(kept, dict) or list(kept) == list(fused[key])
    assert bool(twins.blocks) == (name in IN_BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize("name", _cases())
def test_compiled_too(name: str) -> None:
    _check_parameters(*_trained(name, compile=True))
