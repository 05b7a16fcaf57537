"""Large parameters on the CPU: the step as one pass of the library, bit by bit what the optimizer's own is."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import fuse, fuse_optimizer, library_program
from bagua_core.fused_optimizer.block_sizes import Way
from bagua_core.fused_optimizer.fuse import step_of
from bagua_core.kernels import targets
from tests.core.fused_optimizer.test_every_torch_optimizer import ELEMENTWISE, VARIANTS
from tests.core.fused_optimizer.third_party import DataWriter, Lion, Written
from tests.core.fused_optimizer.twins import Twins, shapes_net

CASES = [
    pytest.param(kind, options, id="-".join([kind.__name__, *map(str, options)]))
    for kind in [*ELEMENTWISE, Lion]
    for options in [{}, *VARIANTS.get(kind.__name__, [])]
]
ONE_OPERATION = {"SGD"}  # without options


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "_BY_LIBRARY", dataclasses.replace(fuse._BY_LIBRARY, least_elements=1))


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "bagua.fused_optimizer"]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_same_bits_in_one_pass(
    kind: type[Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Of parameters and all states, under a schedule, with programs made once."""
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: kind(params, **{"lr": 1e-2, **options}), shapes_net)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.9) for o in twins.optimizers]
    programs = []
    for _ in range(9):
        twins.train(1)
        for scheduler in schedulers:
            scheduler.step()
        programs.append(twins.step.recorded and twins.step.recorded.programs)
    twins.check()
    if kind.__name__ in ONE_OPERATION and not options:
        assert twins.step.way is Way.BY_OPERATION
        assert "passes over memory once as it is" in reasons(caplog)[0]
        return
    assert twins.step.way is Way.BY_LIBRARY, reasons(caplog)
    assert programs[1] >= 1 and programs[-1] <= 2 and len(set(programs[6:])) == 1, programs
    assert sorted(len(block.members) for block in twins.blocks) == [1, 1, 10], "nothing is left out"


def test_a_script_that_asks_for_lists_gets_one_pass_where_their_bits_are_the_same() -> None:
    for foreach in (True, False):
        twins = Twins(lambda params, f=foreach: torch.optim.AdamW(params, lr=1e-2, foreach=f), shapes_net)  # type: ignore[misc]
        twins.train(5)
        twins.check()
        assert twins.step.way is Way.BY_LIBRARY


def test_one_that_has_kernels_of_its_own_keeps_them() -> None:
    twins = Twins(lambda params: torch.optim.Adam(params, lr=1e-2, fused=True), shapes_net)
    twins.train(4)
    twins.check(lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-7))
    assert twins.step.way is Way.BY_OPERATION


def test_other_precisions_keep_their_step() -> None:
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-2), shapes_net, dtype=torch.float64)
    twins.train(4)
    twins.check()
    assert twins.step.way is Way.BY_OPERATION
    assert twins.step.recorded.programs == 0, "it was known before, and nothing was tried"


class KeepsInDouble(Written):
    """A state of another precision than its parameter."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        total = state.setdefault("total", torch.zeros_like(p, dtype=torch.float64))
        total.add_(g)
        p.sub_(total.float(), alpha=group["lr"])


def test_states_in_other_precisions_keep_their_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: KeepsInDouble(params, lr=1e-3), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None and reasons(caplog)


def test_groups_with_options_of_their_own_and_absent_gradients() -> None:
    def groups(model: nn.Module) -> Any:
        parameters = list(model.parameters())
        return [
            {"params": parameters[:4], "weight_decay": 0.1},
            {"params": parameters[4:], "lr": 1e-3, "amsgrad": True},
        ]

    def remove(model: nn.Module) -> None:
        if twins.steps % 3 == 2:
            for parameter in list(model.parameters())[1::4]:
                parameter.grad = None

    twins = Twins(lambda g: torch.optim.AdamW(g, lr=1e-2), shapes_net, groups=groups)
    twins.train(9, between=remove)
    twins.check()
    assert twins.step.way is Way.BY_LIBRARY and twins.step.recorded.programs >= 2


class ClipsInPlace(Written):
    """Writes to the gradients themselves."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g.clamp_(-1e-3, 1e-3)
        p.add_(g, alpha=-group["lr"])


@pytest.mark.parametrize("keeps", [True, False])
def test_what_a_step_writes_to_gradients_comes_back(keeps: bool) -> None:
    twins = Twins(lambda params: ClipsInPlace(params, lr=1e-2), shapes_net)
    for _ in range(4):
        twins.train(1, set_to_none=not keeps)
        for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
            assert torch.equal(one.grad, other.grad) and other.grad.abs().max() <= 1e-3
    twins.check()
    assert twins.step.way is Way.BY_LIBRARY


class NewStates(Written):
    """Puts another tensor in its state's place in each step."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["mean"] = state.get("mean", torch.zeros_like(p)) * 0.9 + g
        p.sub_(state["mean"], alpha=group["lr"])


def test_states_that_are_exchanged_in_each_step() -> None:
    twins = Twins(lambda params: NewStates(params, lr=1e-2), shapes_net)
    twins.train(6)
    twins.check()
    assert twins.step.way is Way.BY_LIBRARY


def test_a_step_that_gives_parameters_new_memory_goes_on_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: DataWriter(params), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None and "new memory" in reasons(caplog)[0]


class Exponential(Written):
    """Works on each element, with an operation that the library has not."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g * torch.exp(-g.abs()), alpha=group["lr"])


def test_what_the_library_cannot_do_goes_on_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: Exponential(params, lr=1e-2), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None and twins.blocks
    assert "the library has no exp" in reasons(caplog)[0]


class GoesByAnElement(Written):
    """Looks at a first element, of whatever it is given: of a representative, or of a block."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.mul_(1 - group["lr"])
        if p.flatten()[0].item() < 1e30:
            p.sub_(g, alpha=group["lr"])


def test_a_step_that_looks_at_single_elements_is_not_made_a_program(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: GoesByAnElement(params, lr=1e-2), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None
    assert "makes one value of many elements" in reasons(caplog)[0]


def test_a_program_that_gives_other_bits_is_never_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a machine whose torch rounds in a way that the library does not know."""
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    right = library_program.torchs_variants()
    wrong = {**right, "add_product": "add_quotient"}
    monkeypatch.setattr(library_program, "torchs_variants", lambda: wrong)
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-2), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None and "other results" in reasons(caplog)[0]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    caches = (targets.compiled_library, library_program.torchs_variants)
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setenv(targets.CHOICE_VARIABLE, "fallback")
    yield
    for cache in caches:
        cache.cache_clear()


def test_without_a_library_everything_is_as_before(
    no_library: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "bagua.fused_optimizer")
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-2), shapes_net)
    twins.train(4)
    twins.check()
    assert twins.step.recorded is None and "BAGUA_KERNELS=fallback" in reasons(caplog)[0]


def test_a_closure_is_called_once_and_gives_its_loss() -> None:
    torch.manual_seed(0)
    net = shapes_net()
    optimizer = fuse_optimizer(torch.optim.AdamW(net.parameters(), lr=1e-5))
    called = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 6)).square().sum()
        loss.backward()
        called.append(loss.item())
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]  # type: ignore[no-untyped-call]
    assert losses == called and len(called) == 5 and losses[-1] < losses[0]
    assert step_of(optimizer).way is Way.BY_LIBRARY
    assert step_of(optimizer).recorded.programs == 1  # type: ignore[union-attr]


def test_below_a_size_recording_a_step_would_cost_more_than_it_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = dataclasses.replace(fuse._BY_LIBRARY, least_elements=1 << 30)
    monkeypatch.setattr(fuse, "_BY_LIBRARY", kind)
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-2), shapes_net)
    twins.train(3)
    twins.check()
    assert twins.step.way is Way.BY_OPERATION and twins.step.recorded.programs == 0


def test_each_group_costs_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a learning rate for each layer."""
    elements = sum(p.numel() for p in shapes_net().parameters())
    kind = dataclasses.replace(fuse._BY_LIBRARY, least_elements=elements // 3)
    monkeypatch.setattr(fuse, "_BY_LIBRARY", kind)
    for count, way in ((3, Way.BY_LIBRARY), (4, Way.BY_OPERATION)):

        def groups(model: nn.Module, count: int = count) -> Any:
            parameters = list(model.parameters())
            return [{"params": parameters[i::count], "lr": 1e-2 / (i + 1)} for i in range(count)]

        twins = Twins(lambda g: torch.optim.AdamW(g), shapes_net, groups=groups)
        twins.train(4)
        twins.check()
        assert twins.step.way is way, count


def test_a_state_dict_goes_both_ways_between_a_step_in_one_pass_and_one_that_is_not_fused() -> None:
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-2), shapes_net)
    twins.train(3)
    states = [optimizer.state_dict() for optimizer in twins.optimizers]
    for optimizer, state in zip(twins.optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    twins.train(3)
    twins.check()
    assert twins.step.way is Way.BY_LIBRARY
