"""A failed step leaves no trace in what a script has: parameters, buffers, gradients, settings of optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bagua_core.elastic.state.state_registry import StateRegistry
from tests.core.elastic.state.trainings import Nested, Net, Odd, Training, clamp, odd, shrink, wire_form

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


def test_a_failed_step_gives_back_gradients_that_the_script_changed_before_its_backward() -> None:
    """A script whose optimizer comes at the top of a step unscales, uses and clears the gradients there."""
    model, optimizer, registry = odd()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    parameters = list(model.layer.parameters())
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    for is_cleared, has_backward in ((False, True), (True, True), (True, False)):
        registry.snapshot()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        if is_cleared:
            optimizer.zero_grad()
        if has_backward:
            loss = model(torch.ones(1, 3)).sum()
            registry.backward_begins()
            loss.backward()
        registry.protect()
        registry.roll_back()
        registry.roll_back_gradients()
        after = [p.grad for p in parameters]
        assert all(a is not None and torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_gradients_that_an_optimizer_has_used_are_copied_in_a_backward_only() -> None:
    """Which most scripts clear first: they pay nothing for the others."""
    model, optimizer, registry = odd()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    registry.stepped(optimizer)
    registry.step_committed()
    for _ in range(2):
        registry.snapshot()
        loss = model(torch.ones(1, 3)).sum()
        registry.protect()
        registry.roll_back()
        registry.roll_back_gradients()
        assert all(p.grad is not None for p in model.layer.parameters()), "no backward has changed them"
    registry.snapshot()
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).sum()
    registry.backward_begins()
    loss.backward()
    registry.roll_back()
    registry.roll_back_gradients()
    assert all(p.grad is None for p in model.layer.parameters())


class GradientOperations(TorchDispatchMode):
    """Counts operations on the gradients of some parameters, and their copies that are alive together."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.parameters = parameters
        self.count = 0
        self.most_alive = 0
        self._copies: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        memory = {p.grad.data_ptr() for p in self.parameters if p.grad is not None}
        is_on_gradient = isinstance(args[0], torch.Tensor) and args[0].data_ptr() in memory
        result = func(*args, **(kwargs or {}))
        self.count += is_on_gradient
        if is_on_gradient and func is torch.ops.aten.clone.default:
            self._copies.append(weakref.ref(result))
            self.most_alive = max(self.most_alive, sum(copy() is not None for copy in self._copies))
        return result


def test_a_snapshot_does_nothing_to_gradients_that_an_optimizer_has_used() -> None:
    """Of which there may be thousands in each step; each operation on a DTensor takes microseconds."""
    model, optimizer, registry = odd()
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    registry.stepped(optimizer)
    registry.step_committed()
    with GradientOperations(list(model.layer.parameters())) as operations:
        registry.snapshot()
    assert operations.count == 0


def test_one_copy_of_gradients_that_live_over_several_steps_is_held_at_a_time() -> None:
    model, _, registry = odd()
    parameters = list(model.layer.parameters())
    model(torch.ones(1, 3)).sum().backward()  # type: ignore[no-untyped-call]
    with GradientOperations(parameters) as operations:
        for _ in range(3):
            registry.snapshot()
            registry.step_committed()
    assert operations.most_alive == len(parameters)
