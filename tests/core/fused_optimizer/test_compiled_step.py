"""compile=True: the whole step as one compiled pass over blocks, for any elementwise optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua_core.fused_optimizer import FusedOptimizerError, NoCompilerError, fuse_optimizer
from bagua_core.fused_optimizer.compiled_program import CompiledProgram
from tests.core.fused_optimizer.test_every_torch_optimizer import ELEMENTWISE
from tests.core.fused_optimizer.third_party import DataWriter, Lion, Remembers
from tests.core.fused_optimizer.twins import Twins, quietly, shapes_net

QUICK = {"AdamW", "RMSprop"}
CASES = [
    pytest.param(kind, marks=[] if kind.__name__ in QUICK else [pytest.mark.long])
    for kind in [*ELEMENTWISE, Lion]
]


def close(one: Tensor, other: Tensor) -> bool:
    """Compiled code rounds a multiplication and an addition otherwise."""
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", CASES)
def test_the_result_is_equal_within_rounding_and_a_schedule_compiles_nothing(kind: type[Any]) -> None:
    # a step far below the gradients' signs: those of two roundings may differ where a gradient is almost zero
    twins = Twins(lambda params: kind(params, lr=1e-4), shapes_net, compile=True)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in twins.optimizers]
    has_states = bool(twins.optimizers[0].state)
    compiled = []
    for _ in range(8):
        twins.train(1)
        for scheduler in schedulers:
            scheduler.step()
        compiled.append(twins.step.recorded.programs)
    twins.check(close)
    makes_states = not has_states and bool(twins.optimizers[0].state)
    assert compiled[0] == (0 if makes_states else 1), "a step that makes states is not compiled"
    assert compiled[-1] >= 1 and compiled[2:5] == [compiled[2]] * 3 and compiled[6:] == [compiled[6]] * 2
    members = [len(block.members) for block in twins.blocks]
    assert sorted(members) == [1, 1, 10], "large ones are blocks of their own, and none is left out"


def test_where_gradients_stay_large_parameters_come_together_too() -> None:
    """Fewer calls; but not where large gradients would have to be copied in each step."""
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-4), shapes_net, compile=True)

    def members() -> list[int]:
        return sorted(len(block.members) for block in twins.blocks)

    twins.train(1)
    assert members() == [1, 1, 10]
    twins.train(6, set_to_none=False)
    assert members() == [2, 10], "those that lie together already stay so"
    laid_out = twins.step.laid_out
    twins.train(3, set_to_none=False)
    twins.check(close)
    assert twins.step.laid_out == laid_out
    twins.train(4)
    assert members() == [1, 1, 10], "they stay no more"
    laid_out = twins.step.laid_out
    twins.train(4, set_to_none=False)
    assert members() == [1, 1, 10] and twins.step.laid_out == laid_out, "and it is left at that"
    twins.check(close)


def test_gradients_that_stay_where_they_cannot_be_moved_make_no_larger_blocks() -> None:
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
        laid_out.append(twins.step.laid_out)
    assert any(block.copies_what_stays for block in twins.blocks)
    assert laid_out[-1] == laid_out[2], "nor is anything laid out again for it"
    twins.check(close)


def test_gradients_that_are_absent_and_states_that_are_loaded() -> None:
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
    assert twins.step.recorded.programs == 1


def test_what_cannot_be_compiled_goes_on_in_blocks_and_says_so_once() -> None:
    twins = Twins(DataWriter, compile=True)
    _, warned = quietly(lambda: twins.train(3))
    assert len(warned) == 1
    assert "DataWriter cannot be compiled (it gives parameters new memory)" in warned[0]
    twins.check()
    assert twins.blocks


def test_a_global_norm_is_no_elementwise_program() -> None:
    class ClipsAll(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = None if closure is None else torch.enable_grad()(closure)()
            gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
            for g in gradients:
                g.div_(norm.clamp_min(1.0))
            super().step()
            return loss

    twins = Twins(lambda params: ClipsAll(params, lr=1e-2), compile=True)
    _, warned = quietly(lambda: twins.train(3))
    assert len(warned) == 1 and "makes one value of many elements" in warned[0]
    twins.check(close)


def test_without_a_compiler_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(
        NoCompilerError, match=r"there is no no-such-compiler on PATH; install g\+\+, set CXX"
    ):
        fuse_optimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), compile=True)


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
    ours = [text for text in warned if "cannot be compiled" in text]  # torch has warnings of its own
    assert len(ours) == 1 and "the step of AdamW cannot be compiled (torch.compile fails on it: " in ours[0]
    twins.check()
    assert twins.blocks and twins.step.recorded is None


def test_what_a_state_remembers_of_parameters_is_what_they_were_before() -> None:
    """torch.compile (2.13) takes what they are after the step."""
    twins = Twins(lambda params: Remembers(params, lr=1e-2), shapes_net, compile=True)
    _, warned = quietly(lambda: twins.train(5))
    twins.check(close)
    assert twins.step.recorded.programs >= 1
    assert not any("cannot be compiled" in text for text in warned)


def test_a_program_that_gives_other_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    right = CompiledProgram.run

    def wrong(self: CompiledProgram, recording: Any, parts: Any) -> list[list[Tensor]]:
        results = right(self, recording, parts)
        parts[0][0].data.mul_(1.01)
        return results

    monkeypatch.setattr(CompiledProgram, "run", wrong)
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), compile=True)
    _, warned = quietly(lambda: twins.train(4))
    ours = [text for text in warned if "cannot be compiled" in text]
    assert len(ours) == 1 and "its program gives other results than the step" in ours[0]
    twins.check()
    assert twins.blocks and twins.step.recorded is None


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


def test_with_a_closure() -> None:
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
    assert called == 10 and twins.step.recorded.programs == 1


class OtherwiseForLists(torch.optim.SGD):
    """Takes twice the step for parameters in a list, as an optimizer whose two ways differ."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            times = 1.0 if group["foreach"] is False else 2.0
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (times * group["lr"]))


def test_one_whose_steps_for_lists_are_others_is_not_compiled() -> None:
    """Compiled, it would be stepped one by one."""
    twins, warned = quietly(lambda: Twins(lambda params: OtherwiseForLists(params, lr=1e-2), compile=True))
    with pytest.warns(UserWarning, match="takes other steps for lists"):
        twins.train(3)
    twins.check()
    assert twins.step.recorded is None and not warned
    alone = Twins(lambda params: OtherwiseForLists(params, lr=1e-2, foreach=False), compile=True)
    alone.train(3)
    alone.check(close)
    assert alone.step.recorded is not None
