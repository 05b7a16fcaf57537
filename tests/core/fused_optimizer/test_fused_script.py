"""A fused optimizer supports the uses of a plain one: states, groups, schedules, scaling, hooks, copies."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua_core as bagua
from bagua_core.fused_optimizer import FusedOptimizerError, fuse, fuse_optimizer, is_fused, trial
from bagua_core.fused_optimizer.flat_memory import may_move
from bagua_core.torch_api.contrib import fuse_optimizer as original_name
from tests.core.fused_optimizer.third_party import Lion
from tests.core.fused_optimizer.twins import Twins, check_alike, quietly, shapes_net, small_net, step_of


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def descent(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


MAKES = [adam, momentum, descent, Lion]


def saved(state: Any) -> Any:
    """Through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


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


# -- memory


def flat_views(count: int) -> tuple[Tensor, list[nn.Parameter]]:
    flat = torch.randn(5 * count)
    return flat, [nn.Parameter(flat[5 * i : 5 * i + 5]) for i in range(count)]


def test_parameters_that_lie_in_one_memory_already_stay_there() -> None:
    flat, parameters = flat_views(4)
    optimizer = fuse_optimizer(adam(parameters))
    for _ in range(2):
        for p in parameters:
            p.grad = torch.ones(5)
        optimizer.step()
    (block,) = step_of(optimizer).layout.blocks
    assert block.whole.data_ptr() == flat.data_ptr()
    assert torch.equal(flat, torch.cat([p.detach() for p in parameters]))


@pytest.mark.parametrize("who", ["a larger memory", "a view", "another process"])
def test_memory_that_something_else_looks_at_is_not_left(who: str) -> None:
    """What looks at it goes on seeing what the step wrote."""
    if who == "a larger memory":
        flat, all_of_it = flat_views(6)
        parameters = all_of_it[::2]  # in it, but not one after the other
        views = [flat[10 * i : 10 * i + 5] for i in range(3)]
    else:
        parameters = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        if who == "another process":
            for p in parameters:
                p.share_memory_()
        views = [p.detach() for p in parameters]
    optimizer = fuse_optimizer(adam(parameters))
    for _ in range(3):
        for p in parameters:
            p.grad = torch.ones(5)
        optimizer.step()
    assert all(map(torch.equal, views, parameters))
    assert step_of(optimizer).layout.blocks == []


def test_do_flatten_false_moves_nothing() -> None:
    twins = Twins(adam, shapes_net, do_flatten=False)
    pointers = [p.data_ptr() for p in twins.models[1].parameters()]
    twins.train(2)
    assert [len(b.members) for b in twins.blocks] == [1], "the large one is cut where it lies"
    twins.train(2)
    twins.check()
    assert pointers == [p.data_ptr() for p in twins.models[1].parameters()]


def test_parameters_that_get_other_memory_are_found() -> None:
    twins = Twins(adam)
    twins.train(2)
    for model in twins.models:
        for p in list(model.parameters())[2:6]:
            p.data = p.data.clone()
    twins.train(2)
    twins.check()
    for model, optimizer in twins.pairs():
        model.double()
        for state in optimizer.state.values():
            state.update({name: t.double() for name, t in state.items() if t.dim()})
    twins.dtype = torch.float64
    twins.train(2)
    twins.check()
    assert len(twins.blocks) == 1


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
