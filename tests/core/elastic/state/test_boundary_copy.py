"""A step that goes on behind an optimizer step, and fails there, gives back what the optimizer and the script moved."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.elastic.state import boundary_copy
from bagua_core.elastic.state.boundary_copy import FIRST_STEPS, KEPT_FOR_STEPS, BoundaryCopy
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.elastic.step.engine import Engine
from bagua_core.parallel import DistributedDataParallel


def trained() -> tuple[nn.Linear, torch.optim.Optimizer, StateRegistry]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    registry = StateRegistry()
    registry.watches = True
    registry.add_model(model, [optimizer])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, registry


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])


def assert_same(now: Any, before: Any) -> None:
    torch.testing.assert_close(now, before, rtol=0.0, atol=0.0)


def test_optimizer_steps_and_changes_of_the_script_are_undone() -> None:
    model, optimizer, registry = trained()
    before = state_of(model, optimizer)
    registry.snapshot()
    registry.find_changed()
    registry.first_reduced()
    optimizer.step()
    registry.stepped(optimizer)
    with torch.no_grad():
        model.weight.mul_(0.5)
    registry.protect()
    registry.roll_back()
    assert_same(state_of(model, optimizer), before)


def test_parameters_that_the_script_moves_between_two_backwards_are_undone() -> None:
    """As SAM does, also where it puts them back by itself after the failure."""
    model, optimizer, registry = trained()
    before = state_of(model, optimizer)
    registry.snapshot()
    registry.find_changed()
    registry.first_reduced()
    own = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert registry.boundary.is_moved()
    held = registry.capture_for_checkpoint(at_resume_point=True)["modules"][0]["parameter.weight"]
    assert torch.equal(held, own)
    registry.protect()
    model.weight.data = own + 0.25
    registry.roll_back()
    assert_same(state_of(model, optimizer), before)


def test_what_the_script_changed_before_the_first_reduction_goes_back_to_the_resume_point() -> None:
    model, optimizer, registry = trained()
    before = state_of(model, optimizer)
    registry.snapshot()
    with torch.no_grad():
        model.weight.mul_(0.5)
    registry.find_changed()
    registry.first_reduced()
    optimizer.step()
    registry.stepped(optimizer)
    registry.protect()
    registry.roll_back()
    assert_same(state_of(model, optimizer), before)


class Counting(torch.optim.SGD):
    """Has values of the whole optimizer in its state, as MADGRAD does, and a list of tensors, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        self.state.setdefault("k", torch.tensor([0])).add_(1)
        self.state["rate"] = 0.5 * self.state.get("rate", 1.0)
        self.state[self.param_groups[0]["params"][0]].setdefault("old", []).append(self.state["k"].clone())
        return super().step(closure)


def test_values_of_the_whole_optimizer_are_undone_too() -> None:
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    registry = CommittedState().registry
    registry.watches = True
    registry.add_model(model, [optimizer])
    for step in range(2):
        before = state_of(model, optimizer)
        registry.snapshot()
        model(torch.ones(1, 3)).sum().backward()
        registry.find_changed()
        registry.first_reduced()
        optimizer.step()
        registry.stepped(optimizer)
        if step:
            registry.protect()
            registry.roll_back()
            assert_same(state_of(model, optimizer), before)
    assert int(optimizer.state["k"]) == 1 and optimizer.state["rate"] == 0.5


def test_they_count_in_the_size_of_the_state() -> None:
    state = CommittedState()
    model = nn.Linear(3, 2)
    optimizer = Counting(model.parameters(), lr=0.1, momentum=0.9)
    state.registry.add_model(model, [optimizer])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parameters = sum(p.nbytes for p in model.parameters())
    assert state.size_bytes == 2 * parameters + 2 * optimizer.state["k"].nbytes


def test_a_state_that_the_first_step_made_is_gone_again() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    kept = BoundaryCopy()
    kept.step_begins()
    kept.reduced(list(model.parameters()), [optimizer])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert kept.put_back() and not optimizer.state
    assert not kept.put_back()


def kept_in(steps: int, copies: BoundaryCopy, parameters: list[torch.Tensor]) -> list[bool]:
    found = []
    for _ in range(steps):
        copies.step_begins()
        copies.reduced(parameters, [])
        found.append(copies.is_kept)
    return found


def test_a_copy_is_kept_in_the_first_steps_and_after_each_step_that_went_on() -> None:
    copies, parameters = BoundaryCopy(), [torch.ones(4)]
    assert kept_in(FIRST_STEPS + 2, copies, parameters) == [True] * FIRST_STEPS + [False] * 2
    copies.goes_on()
    assert kept_in(KEPT_FOR_STEPS + 1, copies, parameters) == [True] * KEPT_FOR_STEPS + [False]


def test_a_large_state_is_copied_only_once_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_copy, "LARGEST_FIRST_BYTES", 8)
    copies, parameters = BoundaryCopy(), [torch.ones(4)]
    assert kept_in(1, copies, parameters) == [False]
    copies.goes_on()
    assert kept_in(1, copies, parameters) == [True]


def test_the_first_step_of_several_large_models_has_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_copy, "LARGEST_FIRST_BYTES", 8)
    kept = []
    for count in (1, 2):
        registry = StateRegistry()
        registry.watches = True
        for _ in range(count):
            model = nn.Linear(3, 2)
            registry.add_model(model, [torch.optim.SGD(model.parameters())])
        registry.snapshot()
        registry.first_reduced()
        kept.append(registry.boundary.is_kept)
    assert kept == [False, True]


def test_without_memory_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(boundary_copy, "_Copy", full)
    assert kept_in(1, BoundaryCopy(), [torch.ones(4)]) == [False]


@pytest.mark.parametrize("copied", [True, False], ids=["with a copy", "without"])
def test_a_failure_in_a_later_call_of_a_closure_undoes_the_optimizers_step(copied: bool) -> None:
    torch.manual_seed(5)
    engine = Engine(None)
    engine.registry.watches = True
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=5, lr=0.5)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    calls, fails_at = 0, 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if calls == fails_at:
            engine.reduction_failed(CollectiveFailed("a peer is lost"))
        return loss

    if not copied:
        kept_in(FIRST_STEPS, engine.registry.boundary, [])
    engine.next_step()
    optimizer.step(closure)
    engine.next_step()
    before = state_of(net, optimizer)
    calls, fails_at = 0, 4
    optimizer.step(closure)
    assert engine.step_failed and calls == 4
    assert engine.next_step() == 1, "done again"
    assert_same(state_of(net, optimizer), before)
    assert engine.state.final_parts == 0


@pytest.mark.parametrize("copied", [True, False], ids=["with a copy", "without"])
def test_buffers_of_a_step_that_is_done_again_are_those_of_one_step(copied: bool) -> None:
    """Of a critic whose statistics follow its own parameters."""

    def train(fails: bool) -> nn.Module:
        torch.manual_seed(5)
        engine = Engine(None)
        engine.registry.watches = True
        critic = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.5)
        model = DistributedDataParallel(critic, [optimizer], engine=engine)
        if not copied:
            kept_in(FIRST_STEPS, engine.registry.boundary, [])
            engine.registry.boundary.goes_on()
        x = torch.randn(6, 3, dtype=torch.float64)
        for attempt in range(2 if fails else 1):
            engine.next_step()
            for part in range(2):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if fails and attempt == 0 and part == 1:
                    engine.reduction_failed(CollectiveFailed("a peer is lost"))
                optimizer.step()
        assert engine.next_step() == 1
        return critic

    once, again = train(fails=False), train(fails=True)
    assert_same(again.state_dict(), once.state_dict())


@pytest.mark.parametrize("copied", [True, False], ids=["with a copy", "without"])
def test_optimizer_steps_that_stay_in_a_failed_step_are_said(
    copied: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(None)
    engine.registry.watches = True
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    model = DistributedDataParallel(net, [optimizer], engine=engine)
    if not copied:
        kept_in(FIRST_STEPS, engine.registry.boundary, [])
    before = net.weight.detach().clone()
    engine.next_step()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    engine.reduction_failed(CollectiveFailed("a peer is lost"))
    assert engine.next_step() == 0
    assert torch.equal(net.weight, before) == copied
    assert ("1 of its optimizer steps stay" in capfd.readouterr().err) != copied
