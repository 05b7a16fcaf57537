"""The state that a failed step restores, and the state that a joiner takes over, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_registry import StateRegistry


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return result


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw-amsgrad": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "groups": lambda m: torch.optim.SGD(
        [
            {"params": [p]} if p.dim() > 1 else {"params": [p], "lr": 0.5, "momentum": 0.5}
            for p in m.parameters()
        ],
        lr=0.1,
    ),
}


class Training:
    """One worker's model, optimizer, scheduler and scaler, all in its registry."""

    def __init__(self, optimizer: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.registry = StateRegistry()
        self.registry.add_model(self.model, [self.optimizer])
        self.registry.register("scheduler", self.scheduler)
        self.registry.register("scaler", self.scaler)

    def train(self, steps: int, seed: int) -> None:
        data = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(8, 4, generator=data)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()


def wire_form(state: dict[str, Any]) -> tuple[bytes, bytes]:
    """Two states of the same wire form are equal, bit for bit."""
    manifest, tensors = state_codec.encode(state)
    run = torch.empty(tensors.size_bytes, dtype=torch.uint8)
    tensors.read(0, run)
    return manifest, run.numpy().tobytes()


def through_the_wire(state: dict[str, Any]) -> dict[str, Any]:
    manifest, run = wire_form(state)
    received: dict[str, Any] = state_codec.decode(
        manifest, torch.frombuffer(bytearray(run), dtype=torch.uint8)
    )
    return received


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_restored_state_is_the_captured_one_and_trains_on_alike(optimizer: str, steps_before: int) -> None:
    holder, newcomer = Training(optimizer, 1), Training(optimizer, 2)
    holder.train(3, seed=5)
    newcomer.train(steps_before, seed=6)  # a member that was left out has a state of its own
    assert wire_form(holder.registry.capture()) != wire_form(newcomer.registry.capture())

    newcomer.registry.restore(through_the_wire(holder.registry.capture()))

    assert wire_form(holder.registry.capture()) == wire_form(newcomer.registry.capture())
    for training in (holder, newcomer):
        training.train(4, seed=7)
    assert wire_form(holder.registry.capture()) == wire_form(newcomer.registry.capture())


def test_a_restored_state_keeps_the_tensors_that_the_script_has() -> None:
    holder, newcomer = Training("sgd", 1), Training("sgd", 2)
    holder.train(2, seed=5)
    before = [*newcomer.model.parameters(), *newcomer.model.buffers()]
    newcomer.registry.restore(through_the_wire(holder.registry.capture()))
    after = [*newcomer.model.parameters(), *newcomer.model.buffers()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert newcomer.optimizer.param_groups[0]["params"] == list(newcomer.model.parameters())


def test_a_capture_shares_memory_and_a_restored_state_does_not() -> None:
    holder, newcomer = Training("adam", 1), Training("adam", 2)
    holder.train(2, seed=5)
    newcomer.registry.restore(through_the_wire(holder.registry.capture()))
    saved = wire_form(newcomer.registry.capture())
    holder.train(2, seed=6)
    assert wire_form(newcomer.registry.capture()) == saved


def test_a_capture_holds_also_buffers_that_are_not_saved() -> None:
    names = Training("sgd", 1).registry.capture()["modules"][0]
    assert {
        "parameter.first.weight",
        "buffer.norm.running_mean",
        "buffer.norm.num_batches_tracked",
        "buffer.mask",
    } <= set(names)


# -- a failed step


def forward_and_scheduler(training: Training) -> None:
    """What a failed step may have changed: its optimizer step did nothing."""
    training.model(torch.randn(8, 4))
    training.model.mask.zero_()  # type: ignore[operator]
    training.optimizer._opt_called = True  # type: ignore[attr-defined] # else the scheduler warns
    training.scheduler.step()
    training.scaler.load_state_dict({**training.scaler.state_dict(), "scale": 1.0, "_growth_tracker": 1})


def test_a_failed_step_leaves_no_trace() -> None:
    training = Training("sgd", 1)
    training.train(2, seed=5)
    before = wire_form(training.registry.capture())
    training.registry.snapshot()
    forward_and_scheduler(training)
    assert wire_form(training.registry.capture()) != before
    training.registry.roll_back()
    assert wire_form(training.registry.capture()) == before


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=100),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    ],
    ids=["StepLR", "OneCycleLR", "CosineAnnealingLR"],
)
def test_a_failed_step_leaves_the_learning_rate(
    make: Callable[[torch.optim.Optimizer], Any], lr: float | torch.Tensor
) -> None:
    """A scheduler that the script steps before the step fails, so that no gate holds it back."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    registry = StateRegistry()
    registry.add_model(model, [optimizer])
    registry.register("scheduler", scheduler)
    before = settings(optimizer)
    kept = optimizer.param_groups[0]["lr"]
    registry.snapshot()
    for _ in range(2):  # a step may fail twice
        optimizer._opt_called = True  # type: ignore[attr-defined]
        scheduler.step()
        assert settings(optimizer) != before
        registry.roll_back()
        assert settings(optimizer) == before
    if isinstance(kept, torch.Tensor):
        assert optimizer.param_groups[0]["lr"] is kept


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


def test_a_snapshot_can_be_gone_back_to_again_and_again() -> None:
    training = Training("sgd", 1)
    before = wire_form(training.registry.capture())[1]
    training.registry.snapshot()
    for _ in range(3):
        training.model(torch.randn(8, 4))
        assert wire_form(training.registry.capture())[1] != before
        training.registry.roll_back()
        assert wire_form(training.registry.capture())[1] == before


def test_the_newest_snapshot_counts() -> None:
    training = Training("sgd", 1)
    training.registry.snapshot()
    training.train(1, seed=5)
    training.registry.snapshot()
    committed = training.model.norm.running_mean.clone()  # type: ignore[union-attr, operator]
    training.model(torch.randn(8, 4))
    training.registry.roll_back()
    assert torch.equal(training.model.norm.running_mean, committed)  # type: ignore[arg-type]


def test_buffers_that_were_replaced_since_are_restored() -> None:
    """`module.to(...)` and plain assignment make new tensors; the snapshot is of those that are there."""
    training = Training("sgd", 1)
    training.registry.snapshot()
    training.model.norm.running_mean = torch.full((6,), 3.0)
    training.registry.snapshot()
    training.model.norm.running_mean.fill_(4.0)
    training.registry.roll_back()
    assert training.model.norm.running_mean.tolist() == [3.0] * 6


def test_a_roll_back_without_a_snapshot_changes_nothing() -> None:
    training = Training("sgd", 1)
    before = wire_form(training.registry.capture())
    training.registry.roll_back()
    assert wire_form(training.registry.capture()) == before


class Nested:
    """A state with containers that the script goes on changing."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {
            "list": [1, [2]],
            "tuple": (1, [3]),
            "tensor": torch.ones(2),
            "set": {1},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_a_snapshot_is_a_copy_to_the_bottom() -> None:
    nested = Nested()
    registry = StateRegistry()
    registry.register("nested", nested)
    registry.snapshot()
    for _ in range(2):  # what came back must be no part of the snapshot either
        nested.values["list"][1].append(9)
        nested.values["tuple"][1].append(9)
        nested.values["tensor"].add_(1)
        nested.values["set"].add(9)
        registry.roll_back()
        assert nested.values["list"] == [1, [2]]
        assert nested.values["tuple"] == (1, [3])
        assert nested.values["tensor"].tolist() == [1.0, 1.0]
        assert nested.values["set"] == {1}


# -- what the script changes by itself


class Odd(nn.Module):
    """Changes much of itself in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.encoder = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("late", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count = self.count + 1
        if self.late is None:
            self.late = torch.ones(2)
        for momentum, parameter in zip(self.encoder.parameters(), self.layer.parameters(), strict=True):
            momentum.data = momentum.data * 0.9 + parameter.data * 0.1
        result: torch.Tensor = self.layer(x) + self.encoder(x)
        return result


def odd(watches: bool = True) -> tuple[Odd, torch.optim.Optimizer, StateRegistry]:
    torch.manual_seed(1)
    model = Odd()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    registry = StateRegistry()
    registry.watches = watches
    registry.add_model(model, [optimizer])
    return model, optimizer, registry


def clamp(model: Odd) -> None:
    model.layer.weight.data.clamp_(-0.01, 0.01)  # no version counter sees it


def shrink(model: Odd) -> None:
    with torch.no_grad():
        model.layer.bias.mul_(0.5)


@pytest.mark.parametrize("before", [lambda model: None, clamp, shrink], ids=["forward", "clamp", "shrink"])
@pytest.mark.parametrize("after", [lambda model: None, clamp, shrink], ids=["none", "clamp", "shrink"])
def test_a_failed_step_gives_back_what_the_script_changed(
    before: Callable[[Odd], None], after: Callable[[Odd], None]
) -> None:
    """Before the step is known to have failed, and after."""
    model, _, registry = odd()
    form = wire_form(registry.capture())
    for _ in range(3):
        registry.snapshot()
        before(model)
        model(torch.ones(1, 3))
        registry.protect()
        after(model)
        assert registry.roll_back() == ()
        assert wire_form(registry.capture()) == form
        assert model.late is None


def test_a_step_that_did_not_fail_keeps_what_the_script_changed() -> None:
    model, _, registry = odd()
    for step in range(1, 9):
        registry.snapshot()
        shrink(model)
        model(torch.ones(1, 3))
        registry.find_changed()
        assert float(model.count) == step
    registry.snapshot()
    registry.roll_back()
    assert float(model.count) == 8


def test_a_change_that_was_never_seen_before_is_said() -> None:
    """By then the first steps, in which all parameters are compared, are over."""
    model, _, registry = odd()
    for _ in range(9):
        registry.snapshot()
        model(torch.ones(1, 3))
        registry.find_changed()
    registry.snapshot()
    shrink(model)
    registry.protect()
    assert registry.roll_back() == ("parameter.layer.bias",)
    registry.snapshot()
    value = model.layer.bias.tolist()
    shrink(model)
    registry.protect()
    assert registry.roll_back() == (), "from then on there is a copy"
    assert model.layer.bias.tolist() == value


def test_a_part_that_is_final_stays_when_a_later_part_fails() -> None:
    model, optimizer, registry = odd()
    registry.snapshot()
    shrink(model)
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    registry.find_changed()
    optimizer.step()
    registry.stepped(optimizer)
    stepped = [p.tolist() for p in model.layer.parameters()]
    registry.protect()
    shrink(model)
    registry.roll_back()
    assert [p.tolist() for p in model.layer.parameters()] == stepped


def test_groups_that_were_added_or_removed_in_a_failed_step_are_put_right() -> None:
    _, optimizer, registry = odd()
    kept = optimizer.param_groups[0]
    registry.snapshot()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    del optimizer.param_groups[0]
    registry.protect()
    registry.roll_back()
    assert len(optimizer.param_groups) == 1 and optimizer.param_groups[0] is kept


# -- gradients that stay over several steps


def test_a_failed_step_gives_back_the_gradients_of_earlier_ones() -> None:
    model, _, registry = odd()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    before = [g.grad.clone() for g in model.layer.parameters() if g.grad is not None]
    for _ in range(2):
        registry.snapshot()
        loss = model(torch.ones(1, 3)).sum()
        registry.backward_begins()
        loss.backward()
        registry.protect()
        for parameter in model.layer.parameters():
            parameter.grad = None
        registry.roll_back()
        registry.roll_back_gradients()
        after = [g.grad for g in model.layer.parameters()]
        assert all(a is not None and torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_without_gradients_at_the_begin_there_are_none_after_a_failure() -> None:
    model, _, registry = odd()
    registry.snapshot()
    loss = model(torch.ones(1, 3)).sum()
    registry.backward_begins()
    loss.backward()
    registry.protect()
    registry.roll_back()
    registry.roll_back_gradients()
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_in_a_state_where_there_are_any() -> None:
    """A script may add to them in its next step; nothing tells before that whether it will."""
    model, optimizer, registry = odd()
    assert "gradients" not in registry.capture()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    assert set(registry.capture()["gradients"][0]) == {"parameter.layer.weight", "parameter.layer.bias"}
    optimizer.zero_grad()
    assert "gradients" not in registry.capture()


# -- a copy in two parts, in the middle of a step


def without_gradients(registry: StateRegistry) -> tuple[bytes, bytes]:
    """A worker that joins gets them with the step's reduction."""
    captured = registry.capture()
    captured.pop("gradients", None)
    return wire_form(captured)


def test_a_copy_holds_what_the_holder_s_script_did_until_then_and_where_a_failure_goes_back_to() -> None:
    holder_model, holder_optimizer, holder = odd()
    for _ in range(3):
        holder.snapshot()
        holder_model(torch.ones(1, 3))
        holder.find_changed()
    at_begin = without_gradients(holder)
    holder.snapshot()
    bulk = through_the_wire(holder.bulk())
    holder_optimizer.param_groups[0]["lr"] = 0.7
    shrink(holder_model)
    holder_model(torch.ones(1, 3))
    rest = through_the_wire(holder.rest(at_resume_point=False))

    model, optimizer, registry = odd()
    clamp(model)
    registry.snapshot()
    loss = model(torch.ones(1, 3)).sum()
    loss.backward(retain_graph=True)
    registry.restore_parts(bulk, rest)
    assert without_gradients(registry) == without_gradients(holder)
    assert optimizer.param_groups[0]["lr"] == 0.7
    loss.backward()  # a second one through the same graph: the copy must not be taken for the script's own change

    for each in (registry, holder):
        each.protect()
        each.roll_back()
    for one in (model, holder_model):
        one.zero_grad()
    assert without_gradients(holder) == at_begin == without_gradients(registry)


# -- registration and errors


def test_what_has_no_state_is_refused() -> None:
    registry = StateRegistry()
    with pytest.raises(TypeError, match=r"register_state\('numbers', ...\): list has no state_dict"):
        registry.register("numbers", [1, 2])  # type: ignore[arg-type]


def test_a_name_is_taken_once() -> None:
    registry, nested = StateRegistry(), Nested()
    registry.register("one", nested)
    registry.register("one", nested)  # a script's function that runs twice
    with pytest.raises(ValueError, match=r"register_state\('one', ...\): the name is taken"):
        registry.register("one", Nested())
    assert registry.registered == {"one": nested}


def test_an_optimizer_of_two_models_is_one() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    registry = StateRegistry()
    registry.add_model(one, [optimizer])
    registry.add_model(other, [optimizer])
    assert registry.optimizers == [optimizer]
    assert len(registry.capture()["optimizers"]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s["modules"].pop(),
        lambda s: s["modules"][0].pop("parameter.first.weight"),
        lambda s: s["optimizers"].pop(),
        lambda s: s["registered"].update(other={}),
    ],
    ids=["model", "tensor", "optimizer", "registered"],
)
def test_a_state_of_other_things_does_not_fit(damage: Callable[[dict[str, Any]], Any]) -> None:
    state = through_the_wire(Training("sgd", 1).registry.capture())
    damage(state)
    with pytest.raises((KeyError, ValueError)):
        Training("sgd", 2).registry.restore(state)


def test_fingerprints_differ_where_states_would_not_fit() -> None:
    def fingerprint(model: nn.Module, optimizer: str = "sgd", register: bool = False) -> dict[str, str]:
        registry = StateRegistry()
        registry.add_model(model, [OPTIMIZERS[optimizer](model)])
        if register:
            registry.register("nested", Nested())
        return registry.fingerprint()

    same = fingerprint(nn.Linear(2, 3))
    assert same == fingerprint(nn.Linear(2, 3)), "values of parameters are no part of it"
    others = [
        fingerprint(nn.Linear(3, 2)),  # as many numbers
        fingerprint(nn.Linear(2, 3).double()),
        fingerprint(nn.Linear(2, 3), "adam"),
        fingerprint(nn.Linear(2, 3), register=True),
        fingerprint(nn.Sequential(nn.Linear(2, 3))),
    ]
    assert all(same != other for other in others)


def test_what_cannot_travel_is_found_before_anybody_joins() -> None:
    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"seen": {1, 2}}

        def load_state_dict(self, state_dict: dict[str, object]) -> None: ...

    registry = StateRegistry()
    registry.register("odd", Odd())
    with pytest.raises(state_codec.StateCodecError, match=r"seen.*set"):
        registry.check_travels()


# -- the last checkpoint, of workers that stand at different places of the script


def committed(training: Training) -> None:
    """A step, as the engine sees it."""
    training.registry.snapshot()
    training.registry.backward_begins()
    training.train(1, seed=5)
    training.registry.stepped(training.optimizer)
    training.registry.step_committed()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fails", [False, True])
def test_the_state_in_the_middle_of_a_step_is_that_of_its_resume_point(optimizer: str, fails: bool) -> None:
    training = Training(optimizer, 1)
    registry = training.registry
    committed(training)
    expected = wire_form(registry.capture_last(at_resume_point=False))
    registry.snapshot()
    # what a script does in a step before its optimizer
    training.optimizer.zero_grad()
    loss = training.model(torch.randn(8, 4)).sum()
    registry.backward_begins()
    loss.backward()
    training.optimizer.param_groups[0]["lr"] = 7.0
    training.scheduler.step()
    set_by_script = [group["lr"] for group in training.optimizer.param_groups]
    if fails:
        registry.protect()
        with torch.no_grad():
            training.model.first.weight.add_(1.0)
    assert wire_form(registry.capture_last(at_resume_point=True)) == expected
    assert wire_form(registry.capture_last(at_resume_point=False)) != expected
    assert [group["lr"] for group in training.optimizer.param_groups] == set_by_script, "it was only read"
    registry.roll_back()
    registry.roll_back_gradients()
    assert wire_form(registry.capture_last(at_resume_point=False)) == expected


def test_gradients_are_in_the_last_checkpoint_until_their_optimizer_has_used_them() -> None:
    training = Training("adam", 1)
    registry, model = training.registry, training.model
    registry.snapshot()
    model(torch.ones(8, 4)).sum().backward()  # type: ignore[no-untyped-call]
    registry.step_committed()  # a step of several whose gradients add up
    (held,) = registry.capture_last(at_resume_point=False)["gradients"]
    assert held.keys() == {"parameter." + name for name, _ in model.named_parameters()}
    registry.snapshot()
    registry.backward_begins()
    model(torch.ones(8, 4)).sum().backward()  # type: ignore[no-untyped-call]
    (before,) = registry.capture_last(at_resume_point=True)["gradients"]
    (now,) = registry.capture_last(at_resume_point=False)["gradients"]
    name = "parameter.last.bias"
    assert torch.equal(2 * before[name], now[name]), "a step that did not happen added nothing"
    training.optimizer.step()
    registry.stepped(training.optimizer)
    registry.step_committed()
    assert "gradients" not in registry.capture_last(at_resume_point=False)
