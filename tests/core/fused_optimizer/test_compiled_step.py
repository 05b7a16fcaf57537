"""compile=True: the step on blocks is compiled by torch.compile, and checked beside the optimizer's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import FusedOptimizerError, fuse_optimizer
from bagua_core.fused_optimizer.block_optimizer import plain_step
from bagua_core.fused_optimizer.compiled_step import close as close_enough
from bagua_core.fused_optimizer.compiled_step import why_no_compiler
from tests.core.fused_optimizer.test_every_torch_optimizer import ELEMENTWISE
from tests.core.fused_optimizer.third_party import DataWriter, Lion, Remembers, Written
from tests.core.fused_optimizer.twins import Twins, quietly, shapes_net

COMPILE = "torch._inductor.compile_fx.compile_fx"  # named, as every lane of a run imports this module
# Its code computes ax + (p - ax) where its own step copies p: on elements of all magnitudes these differ.
NOT_COMPILED = {"ASGD"}
TRACED = [kind for kind in ELEMENTWISE if kind.__name__ not in NOT_COMPILED]


def close(one: Tensor, other: Tensor) -> bool:
    """Compiled code rounds a multiplication and an addition otherwise."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile traces the step, and the graph runs as it is: no C++ compiler, which takes seconds."""

    monkeypatch.setattr(COMPILE, lambda graph, inputs: graph.forward)


def says_not_compiled(warned: list[str]) -> list[str]:
    """Without torch's own warnings."""
    return [text for text in warned if "cannot be compiled" in text]


def test_torchs_wrappers_are_left_out_also_once_torch_compile_has_patched_the_class() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    for kind in ELEMENTWISE:
        kind([nn.Parameter(torch.ones(2))])  # which wraps the step of its class
        assert plain_step(kind).__code__.co_name == "step"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, pytest.param(Lion, marks=pytest.mark.long)])
def test_compiled_code_gives_an_equal_result(kind: type[Any]) -> None:
    trains_and_stops_compiling(kind)


@pytest.mark.parametrize(
    "kind",
    # each takes about ten seconds of processor time; the two have unlike states
    [
        k if k in (torch.optim.NAdam, torch.optim.RMSprop) else pytest.param(k, marks=pytest.mark.long)
        for k in TRACED
    ],
)
def test_every_torch_optimizer_is_traced_and_gives_an_equal_result(
    kind: type[Any], traced_only: None
) -> None:
    trains_and_stops_compiling(kind)


def trains_and_stops_compiling(kind: type[Any]) -> None:
    """Under a schedule."""
    # a step far below the gradients' signs: those of two roundings may differ where a gradient is almost zero
    twins = Twins(lambda params: kind(params, lr=1e-4), shapes_net, compile=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in twins.optimizers]
    compiled = []
    for _ in range(8):
        twins.train(1)
        for scheduler in schedulers:
            scheduler.step()
        compiled.append(twins.step.compiled.compilations)
    twins.check(close)
    assert compiled[0] == 0, "the first step makes states"
    assert compiled[1] >= 1 and len(set(compiled[4:])) == 1, compiled
    members = [len(block.members) for block in twins.blocks]
    assert sorted(members) == [1, 1, 10], "large ones are blocks of their own, and none is left out"


class ClipsInPlace(Written):
    """Writes to the gradients themselves."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g.clamp_(-1e-3, 1e-3)
        p.add_(g, alpha=-group["lr"])


def test_what_a_compiled_step_writes_to_gradients_comes_back() -> None:
    twins = Twins(lambda params: ClipsInPlace(params, lr=1e-2), compile=True)
    for keeps in (False, False, False, True, True):
        twins.train(1, set_to_none=not keeps)
        for one, other in zip(*(m.parameters() for m in twins.models), strict=True):
            assert close(one.grad, other.grad) and other.grad.abs().max() <= 1e-3
    twins.check(close)
    assert twins.step.compiled.compilations >= 1


def test_where_gradients_stay_large_parameters_come_together_too(traced_only: None) -> None:
    """Fewer calls; but not where large gradients would have to be copied in each step."""
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-4), shapes_net, compile=True)

    def members() -> list[int]:
        return sorted(len(block.members) for block in twins.blocks)

    twins.train(1)
    assert members() == [1, 1, 10]
    twins.train(6, set_to_none=False)
    assert members() == [2, 10], "those that lie together already stay so"
    laid_out = twins.laid_out
    twins.train(3, set_to_none=False)
    twins.check(close)
    assert twins.laid_out == laid_out
    twins.train(4)
    assert members() == [1, 1, 10], "they stay no more"
    laid_out = twins.laid_out
    twins.train(4, set_to_none=False)
    assert members() == [1, 1, 10] and twins.laid_out == laid_out, "and it is left at that"
    twins.check(close)


def test_gradients_that_stay_where_they_cannot_be_moved_make_no_larger_blocks(traced_only: None) -> None:
    """Large ones would have to be copied in each step."""
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-4), shapes_net, compile=True)
    for model in twins.models:
        for parameter in model.parameters():
            room = torch.zeros(parameter.numel() + 8)  # which another tensor may view
            parameter.grad = room[: parameter.numel()].view_as(parameter)
    laid_out = []
    for _ in range(8):
        twins.train(1, set_to_none=False)
        assert sorted(len(block.members) for block in twins.blocks) == [1, 1, 10]
        laid_out.append(twins.laid_out)
    assert any(block.copies_what_stays for block in twins.blocks)
    assert laid_out[-1] == laid_out[2], "nor is anything laid out again for it"
    twins.check(close)


def test_gradients_that_are_absent_and_states_that_are_loaded(traced_only: None) -> None:
    def remove(model: nn.Module) -> None:
        if 2 <= twins.steps < 5:
            next(iter(model.parameters())).grad = None

    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-4), compile=True)
    twins.train(7, between=remove)
    twins.check(close)
    for _, optimizer in twins.pairs():
        optimizer.load_state_dict(optimizer.state_dict())
    twins.train(2)
    twins.check(close)
    assert twins.step.compiled.compilations >= 1


def test_what_cannot_be_compiled_goes_on_in_blocks_and_says_so_once(traced_only: None) -> None:
    twins = Twins(DataWriter, compile=True)
    _, warned = quietly(lambda: twins.train(3, set_to_none=False))
    assert len(says_not_compiled(warned)) == 1 and "DataWriter" in says_not_compiled(warned)[0]
    twins.check()
    assert twins.blocks and twins.step.compiled is None


def test_a_global_norm_is_no_elementwise_program() -> None:
    class ClipsAll(Written):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            norm = torch.stack([p.grad.square().sum() for p in group["params"]]).sum().sqrt()
            for p in group["params"]:
                p.sub_(p.grad / norm.clamp_min(1.0) * group["lr"])

    twins = Twins(lambda params: ClipsAll(params, lr=1e-2), compile=True)
    _, warned = quietly(lambda: twins.train(3, set_to_none=False))
    (text,) = says_not_compiled(warned)
    assert "makes one value of many elements" in text
    twins.check(close)


def test_without_a_compiler_it_says_so_once_and_steps_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    assert why_no_compiler(torch.device("cpu")) is not None
    twins, warned = quietly(lambda: Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), compile=True))
    (text,) = [w for w in warned if "compile=True" in w]
    assert "there is no C++ compiler no-such-compiler on PATH; install g++ or set CXX" in text
    _, warned = quietly(lambda: twins.train(3))
    assert not [w for w in warned if "compile=True" in w]
    twins.check()
    assert twins.blocks and twins.step.compiled is None


def test_a_compiler_that_fails_costs_nothing_but_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is met in the third step at the latest, when there are states; the step goes on uncompiled."""
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho out of disk >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with torch._inductor.config.patch({"cpp.cxx": (None, str(broken)), "force_disable_caches": True}):
        twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), compile=True)
        _, warned = quietly(lambda: twins.train(4))
    ours = says_not_compiled(warned)
    assert len(ours) == 1 and "the step of AdamW cannot be compiled (torch.compile fails on it: " in ours[0]
    twins.check()
    assert twins.blocks and twins.step.compiled is None


def test_what_a_state_remembers_of_parameters_is_what_they_were_before() -> None:
    """torch.compile (2.13) can take what they are after the step; the check notices."""
    twins = Twins(lambda params: Remembers(params, lr=1e-2), compile=True)
    quietly(lambda: twins.train(5))
    twins.check(close)


def test_code_that_gives_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            results = graph.forward(*args)
            for value in args:
                if isinstance(value, Tensor) and value.dim():
                    value.data.mul_(1.01)
            return results

        return run

    monkeypatch.setattr(COMPILE, wrong)
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), compile=True)
    _, warned = quietly(lambda: twins.train(4))
    (text,) = says_not_compiled(warned)
    assert "compiled, it gives other results" in text
    twins.check()
    assert twins.blocks and twins.step.compiled is None


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(torch.float64, 1e-7, 1e-5), (torch.float32, 1e-4, 1e-2), (torch.bfloat16, 0.05, 0.3)],
)
def test_the_check_allows_rounding_and_few_elements_that_are_far_off(
    dtype: torch.dtype, near: float, far: float
) -> None:
    expected = torch.logspace(-6, 2, 1000, dtype=torch.float64).to(dtype)
    assert close_enough(expected, expected * (1 + near))
    assert not close_enough(expected, expected * (1 + far))
    got = expected.clone()
    got[:40] *= -1
    assert close_enough(expected, got)
    got[:60] = float("nan")
    assert not close_enough(expected, got)


def test_torchs_own_fused_step_is_one_pass_already() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    with pytest.raises(FusedOptimizerError, match="leave one of both out"):
        fuse_optimizer(optimizer, compile=True)


def test_a_compiled_model_trains_with_a_fused_optimizer() -> None:
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3))
    alone, fused = twins.models
    compiled = torch.compile(fused, backend="aot_eager")
    twins.train(1)
    for _ in range(4):
        for model, optimizer in zip((alone, compiled), twins.optimizers, strict=True):
            optimizer.zero_grad()
            twins.backward(model)  # type: ignore[arg-type]
            optimizer.step()
        twins.steps += 1
    twins.check(close)
    assert twins.blocks


def test_with_a_closure(traced_only: None) -> None:
    """As Lightning always has one: called once a step, also in the one that makes states."""
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-4), shapes_net, compile=True)
    called = 0
    for _ in range(5):
        losses = []
        for model, optimizer in twins.pairs():

            def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                nonlocal called
                called += 1
                optimizer.zero_grad()
                return twins.backward(model)

            losses.append(optimizer.step(closure))
        assert torch.allclose(*losses, rtol=1e-4)
        twins.steps += 1
    twins.check(close)
    assert called == 10 and twins.step.compiled.compilations >= 1


class OtherwiseForLists(torch.optim.SGD):
    """Takes twice the step for parameters in a list, as an optimizer whose two ways differ."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            times = 1.0 if group["foreach"] is False else 2.0
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (times * group["lr"]))


@pytest.mark.parametrize("options", [{}, {"foreach": False}])
def test_one_whose_steps_for_lists_are_others_is_compiled_as_it_was_asked_for(
    options: dict[str, Any], traced_only: None
) -> None:
    twins = Twins(lambda params: OtherwiseForLists(params, lr=1e-2, **options), compile=True)
    twins.train(4, set_to_none=False)
    twins.check(close)
    assert twins.step.compiled.compilations >= 1
