"""Optimizers that torch does not have are recognised by trial: blocks where that is right, wholes where it is not."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.fused_optimizer import PerParameterError, fuse_optimizer, trial_tensors
from bagua_core.fused_optimizer.trial import judge
from tests.core.fused_optimizer import third_party
from tests.core.fused_optimizer.twins import Twins, quietly, shapes_net, step_of


@pytest.mark.parametrize("kind", third_party.ELEMENTWISE)
@pytest.mark.parametrize("net", [None, shapes_net])
def test_elementwise_ones_share_blocks(kind: type[Any], net: Any) -> None:
    made, warned = quietly(lambda: Twins(kind, *([net] if net else [])))
    made.train(5)
    made.check()
    assert made.blocks and warned == []
    for one, other in zip(*(vars(o).items() for o in made.optimizers), strict=False):
        if one[0] == "calls":
            assert one == other == ("calls", 5)


@pytest.mark.parametrize("kind", third_party.OF_WHOLES)
def test_others_are_stepped_as_they_are_and_it_is_said_once(kind: type[Any]) -> None:
    made, warned = quietly(lambda: Twins(kind, shapes_net))
    assert len(warned) == 1 and kind.__name__ in warned[0] and "unfused" in warned[0]
    seed = torch.random.get_rng_state()
    for model, optimizer in made.pairs():
        torch.random.set_rng_state(seed)  # one of them draws noise
        for step in range(3):
            made.steps = step
            optimizer.zero_grad()
            made.backward(model)
            _, warned = quietly(optimizer.step)
            assert warned == []
    made.check()
    assert made.blocks == []


@pytest.mark.parametrize("kind", third_party.OF_WHOLES)
def test_or_refused(kind: type[Any]) -> None:
    optimizer = kind(nn.Linear(3, 2).parameters())
    with pytest.raises(PerParameterError, match=rf"{kind.__name__}.*Leave strict=True out"):
        fuse_optimizer(optimizer, strict=True)
    assert not hasattr(optimizer, "fuse_step")


@pytest.mark.parametrize("after", [0, 20, 500, 50_000])
def test_what_starts_late_is_seen_all_the_same(after: int) -> None:
    verdict = judge(third_party.StartsLate(nn.Linear(3, 2).parameters(), after=after), 0)
    assert not verdict.is_elementwise
    assert "differs on a block" in verdict.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_done_in_one_precision_only_is_seen(dtype: torch.dtype) -> None:
    verdict = judge(third_party.RoundsAtRandom(nn.Linear(3, 2).to(dtype).parameters()), 0)
    assert verdict.is_elementwise == (dtype is torch.float32)
    assert ("draws random numbers" in verdict.reason) == (dtype is torch.bfloat16)


def test_each_precision_is_tried_wherever_it_comes_from() -> None:
    """In a group beside another, in one group with it, and after the model has become another."""
    single, half = nn.Linear(3, 2), nn.Linear(3, 2).to(torch.bfloat16)
    mixed = third_party.RoundsAtRandom([*single.parameters(), *half.parameters()])
    assert "draws random numbers" in judge(mixed, 0).reason
    groups = [{"params": list(model.parameters())} for model in (single, half)]
    with pytest.warns(UserWarning, match=r"parameter group 1\) does not work"):
        fuse_optimizer(third_party.RoundsAtRandom(groups))
    model = nn.Linear(3, 2)
    optimizer = fuse_optimizer(third_party.RoundsAtRandom(model.parameters()))

    def train() -> int:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return len(step_of(optimizer).layout.blocks)  # type: ignore[union-attr]

    assert train() == 1
    model.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="does not work on each element"):
        assert train() == 0


class Ascends(torch.optim.SGD):
    """As sharpness-aware minimization does it: the closure is called where the parameters were moved to."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            return super().step()
        moved = [
            (p, p.grad.sign()) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for p, direction in moved:
            p.add_(direction, alpha=0.1)
        loss = torch.enable_grad()(closure)()
        for p, direction in moved:
            p.sub_(direction, alpha=0.1)
        super().step()
        return loss


def test_one_that_moves_parameters_before_its_closure_is_not_fused() -> None:
    """A fused step calls the closure first."""
    verdict = judge(Ascends(nn.Linear(3, 2).parameters(), lr=0.01), 0)
    assert not verdict.is_elementwise and "differs on a block" in verdict.reason
    assert judge(torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.01), 0).is_elementwise


def test_beyond_the_trials_steps_it_is_not_seen() -> None:
    """The limit that the documents state."""
    after = max(trial_tensors.JUMPS) * 10
    assert judge(third_party.StartsLate(nn.Linear(3, 2).parameters(), after=after), 0).is_elementwise


def test_each_group_is_judged_by_its_own_options() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        matrices = [p for p in parameters if p.dim() == 2]
        return [
            {"params": matrices, "use_matrices": True},
            {"params": [p for p in parameters if p.dim() != 2]},
        ]

    made, warned = quietly(lambda: Twins(third_party.MatricesOtherwise, groups=groups))
    made.train(4)
    made.check()
    assert len(warned) == 1 and "(parameter group 0)" in warned[0]
    as_they_are, (block,) = made.step.layout.groups
    assert len(as_they_are) == 3 and len(block.members) == len(made.optimizers[1].param_groups[1]["params"])


def test_an_option_that_is_switched_on_later_is_tried_then() -> None:
    made = Twins(third_party.MatricesOtherwise)
    made.train(2)
    assert made.blocks

    def switch() -> None:
        for optimizer in made.optimizers:
            optimizer.param_groups[0]["use_matrices"] = True
        made.train(2)

    _, warned = quietly(switch)
    assert len(warned) == 1 and "MatricesOtherwise" in warned[0]
    made.check()
    assert made.blocks == []


def test_a_trial_changes_nothing() -> None:
    model = nn.Linear(3, 2)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    entries = {name: value for name, value in vars(optimizer).items()}
    states = [dict(s) for s in optimizer.state.values()]
    seeds = torch.random.get_rng_state(), random.getstate()
    assert judge(optimizer, 0).is_elementwise
    assert all(map(torch.equal, model.parameters(), before))
    assert vars(optimizer) == entries and [dict(s) for s in optimizer.state.values()] == states
    assert torch.equal(torch.random.get_rng_state(), seeds[0]) and random.getstate() == seeds[1]


def test_an_option_for_each_parameter_is_refused() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters, "names": ["a", "b", "c"]}], lr=0.1)
    verdict = judge(optimizer, 0)
    assert not verdict.is_elementwise and "'names'" in verdict.reason


def test_named_parameters_are_no_such_option() -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).named_parameters(), lr=0.1)
    assert judge(optimizer, 0).is_elementwise


def test_what_is_no_optimizer() -> None:
    with pytest.raises(TypeError, match=r"Linear.*pass the optimizer itself"):
        fuse_optimizer(nn.Linear(2, 2))  # type: ignore[type-var]
