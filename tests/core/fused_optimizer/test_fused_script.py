"""A script with a fused optimizer does what it did with its own: usage, states, schedulers, closures and hooks."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua_core as bagua
from bagua_core.fused_optimizer import FusedOptimizerError, fuse, fuse_optimizer, is_fused, trial
from bagua_core.torch_api.contrib import fuse_optimizer as original_name
from tests.core.fused_optimizer.fused_makes import MAKES, adam, saved
from tests.core.fused_optimizer.third_party import Lion
from tests.core.fused_optimizer.twins import Twins, check_alike, quietly, shapes_net, small_net, step_of

# -- names and identity


def test_the_original_usage() -> None:
    net = small_net()
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    alone = copy.deepcopy((net, optimizer))
    fused = original_name(optimizer)
    assert fused is optimizer and isinstance(fused, torch.optim.Adadelta) and is_fused(fused)
    for step in (fused.fuse_step, fused.step, fused.fuse_step):  # type: ignore[attr-defined]
        for model, take in ((net, step), (alone[0], alone[1].step)):
            model.zero_grad()
            model(torch.ones(2, 6)).sum().backward()
            take()
    check_alike(alone[1].state_dict(), optimizer.state_dict())
    assert all(map(torch.equal, alone[0].parameters(), net.parameters()))
    assert bagua.fuse_optimizer is original_name


def test_twice_is_harmless_with_the_same_settings() -> None:
    optimizer = fuse_optimizer(adam(small_net().parameters()))
    assert fuse_optimizer(optimizer) is optimizer
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    with pytest.raises(FusedOptimizerError, match="other settings"):
        fuse_optimizer(optimizer, do_flatten=False)


# -- states


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("from_fused", [True, False])
def test_a_state_dict_goes_on_in_the_other_kind(make: Any, from_fused: bool) -> None:
    twins = Twins(make, shapes_net)
    twins.train(3)
    give, take = (1, 0) if from_fused else (0, 1)
    state = saved(twins.optimizers[give].state_dict())
    check_alike(saved(twins.optimizers[take].state_dict()), state)
    twins.train(2)
    fresh = Twins(make, shapes_net)
    for model, source in zip(fresh.models, twins.models, strict=True):
        model.load_state_dict(source.state_dict())
    fresh.optimizers[take].load_state_dict(state)
    fresh.optimizers[give].load_state_dict(copy.deepcopy(state))
    fresh.steps = twins.steps
    fresh.train(3)
    fresh.check()


def test_load_state_dict_in_the_middle() -> None:
    twins = Twins(adam)
    twins.train(2)
    states = [copy.deepcopy(o.state_dict()) for o in twins.optimizers]
    twins.train(3)
    for optimizer, state in zip(twins.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    twins.train(3)
    twins.check()
    assert {float(s["step"]) for s in twins.optimizers[1].state.values()} == {5.0}
    assert twins.laid_out == 2


def zero_averages(states: list[dict[str, Any]]) -> None:
    for state in states:
        state["exp_avg"].zero_()


def set_one_count(states: list[dict[str, Any]]) -> None:
    states[2]["step"].fill_(100.0)


def exchange_one(states: list[dict[str, Any]]) -> None:
    states[3]["exp_avg_sq"] = torch.ones_like(states[3]["exp_avg_sq"])


def exchange_a_whole_state(states: list[dict[str, Any]]) -> None:
    for state in states:
        state.clear()


@pytest.mark.parametrize("write", [zero_averages, set_one_count, exchange_one, exchange_a_whole_state])
def test_what_a_script_writes_into_a_state_counts(write: Callable[[list[dict[str, Any]]], None]) -> None:
    twins = Twins(adam)
    twins.train(2)
    for _, optimizer in twins.pairs():
        write(list(optimizer.state.values()))
    twins.train(3)
    twins.check()
    assert twins.blocks, "and it is still fused"


def test_copies_and_pickles_are_optimizers_like_the_unfused() -> None:
    twins = Twins(adam)
    twins.train(2)
    alone, fused = (copy.deepcopy(pair) for pair in twins.pairs())
    twins.models, twins.optimizers = [alone[0], fused[0]], [alone[1], fused[1]]
    assert not is_fused(fused[1])
    twins.train(2)
    twins.check()
    check_alike(pickle.loads(pickle.dumps(fused[1])).state_dict(), alone[1].state_dict())


# -- groups


def test_groups_of_their_own_options_and_one_added_later() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        parameters = list(model.parameters())
        return [{"params": parameters[:2], "lr": 0.1, "weight_decay": 0.1}, {"params": parameters[2:5]}]

    twins = Twins(adam, groups=groups)
    twins.train(2)
    for model, optimizer in twins.pairs():
        optimizer.add_param_group({"params": list(model.parameters())[5:], "lr": 3e-2, "betas": (0.5, 0.9)})
    twins.train(3)
    twins.check()
    assert [len(b.members) for b in twins.blocks] == [2, 3, 3]
    assert {float(s["step"]) for s in twins.optimizers[1].state.values()} == {5.0, 3.0}


def test_torchs_own_optimizers_are_tried_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def judge(optimizer: torch.optim.Optimizer, group: int) -> Any:
        tried.append(type(optimizer).__name__)
        return trial.judge(optimizer, group)

    monkeypatch.setattr(fuse, "judge", judge)
    monkeypatch.setattr(fuse, "_of_torch", {})
    for lr in (0.1, 0.2):
        fuse_optimizer(torch.optim.SGD(small_net().parameters(), lr))
    assert tried == ["SGD"]
    fuse_optimizer(torch.optim.SGD(small_net().parameters(), 0.1, nesterov=True, momentum=0.9))
    assert tried == ["SGD"] * 2, "another rule"
    for _ in range(2):
        fuse_optimizer(Lion(small_net().parameters()))
    assert tried == ["SGD"] * 2 + ["Lion"] * 2, "what others keep may decide"


@pytest.mark.parametrize("first", ["schedule", "fuse"])
def test_schedulers(first: str) -> None:
    nets = [small_net(), small_net()]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [adam(n.parameters()) for n in nets]
    if first == "fuse":
        fuse_optimizer(optimizers[1])
    schedulers = [
        [torch.optim.lr_scheduler.ExponentialLR(o, 0.7), torch.optim.lr_scheduler.LinearLR(o, 0.1)]
        for o in optimizers
    ]
    if first == "schedule":
        fuse_optimizer(optimizers[1])

    def train() -> None:
        for step in range(4):
            for net, optimizer, of_it in zip(nets, optimizers, schedulers, strict=True):
                optimizer.zero_grad()
                net(torch.full((2, 6), float(step))).square().sum().backward()
                (optimizer.fuse_step if is_fused(optimizer) else optimizer.step)()  # type: ignore[attr-defined]
                for one in of_it:
                    one.step()
            layouts.append(step_of(optimizers[1]).layout)

    layouts: list[Any] = []
    _, warned = quietly(train)
    assert warned == []
    assert all(map(torch.equal, *(n.parameters() for n in nets)))
    check_alike(optimizers[0].state_dict(), optimizers[1].state_dict())
    assert len(set(layouts)) == 1, "a rate that changes moves nothing"


def test_closures() -> None:
    twins = Twins(adam)
    for _ in range(3):
        losses = []
        for model, optimizer in twins.pairs():

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                assert torch.is_grad_enabled()
                return twins.backward(model)

            losses.append(optimizer.step(closure))
        assert losses[0] == losses[1]
        twins.steps += 1
    twins.check()


class TwiceAStep(torch.optim.SGD):
    """Asks for gradients twice, as extragradient methods do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        super().step()
        closure()
        super().step()
        return loss


def test_closures_that_are_called_again() -> None:
    twins = Twins(lambda params: TwiceAStep(params, lr=1e-2, momentum=0.9))
    for _ in range(3):
        for model, optimizer in twins.pairs():

            def closure(model: Any = model, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                return twins.backward(model)

            optimizer.step(closure)
        twins.steps += 1
    twins.check()
    assert twins.blocks


# -- hooks and errors


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_see_the_scripts_optimizer_and_what_they_do_to_gradients_counts(when: str) -> None:
    seen: list[tuple[str, int]] = []

    def clip(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [p for g in optimizer.param_groups for p in g["params"]]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        seen.append(("pre", len(parameters)))

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(("post", len(optimizer.state)))

    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = adam(params)
        if when == "before":
            optimizer.register_step_pre_hook(clip)
            optimizer.register_step_post_hook(after)
        return optimizer

    twins = Twins(make)
    handles = []
    if when == "after":
        for optimizer in twins.optimizers:
            handles += [optimizer.register_step_pre_hook(clip), optimizer.register_step_post_hook(after)]
    twins.train(2)
    twins.check()
    assert seen == [("pre", 8), ("post", 8)] * 4
    for handle in handles:
        handle.remove()
    twins.train(1)
    twins.check()
    assert len(seen) == (12 if when == "before" else 8)


class Fails(torch.optim.Adam):
    fails = False

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        if self.fails:
            raise ArithmeticError("at the end of a step")


def test_a_step_that_raises_counts_as_far_as_it_came() -> None:
    twins = Twins(lambda params: Fails(params, lr=1e-2))
    twins.train(2)
    for optimizer in twins.optimizers:
        optimizer.fails = True  # type: ignore[attr-defined]
    for model, optimizer in twins.pairs():
        optimizer.zero_grad()
        twins.backward(model)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.fails = False  # type: ignore[attr-defined]
    twins.train(2)
    twins.check()


def test_a_backward_through_parameters_that_a_step_has_changed_is_noticed() -> None:
    net = small_net()
    optimizer = fuse_optimizer(adam(net.parameters()))
    for retain_graph in (False, True):
        loss = net(torch.ones(2, 6)).square().sum()
        loss.backward(retain_graph=retain_graph)
        optimizer.step()
    (block,) = step_of(optimizer).layout.blocks
    assert len(block.members) == 8
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_optimizers_of_one_model() -> None:
    net, other = small_net(), small_net()
    other.load_state_dict(net.state_dict())
    halves: list[Callable[[nn.Module], list[Any]]] = [
        lambda m: list(m[0].parameters()),
        lambda m: list(m[3:].parameters()),
    ]
    alone = [adam(half(net)) for half in halves]
    fused = [fuse_optimizer(adam(half(other))) for half in halves]
    for _ in range(3):
        for model, optimizers in ((net, alone), (other, fused)):
            for optimizer in optimizers:
                optimizer.zero_grad()
                model(torch.ones(2, 6)).square().sum().backward()
                optimizer.step()
    assert all(map(torch.equal, net.parameters(), other.parameters()))


def test_no_warning_in_ordinary_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        twins = Twins(adam, shapes_net)
        twins.train(2)
