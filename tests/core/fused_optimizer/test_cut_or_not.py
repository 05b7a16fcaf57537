"""Whether large parameters are cut is found out by timing; it changes nothing but the time."""

from __future__ import annotations

import pytest
import torch

from bagua_core.fused_optimizer.layout_choice import STEPS_OF_A_TURN, STEPS_TO_SETTLE, CutOrNot, is_alone
from tests.core.fused_optimizer.twins import Twins, shapes_net


def settle(cut_s: float, whole_s: float) -> tuple[CutOrNot, list[bool]]:
    one = CutOrNot()
    kinds = []
    while not one.is_settled:
        first = kinds[-1:] != [one.cuts]
        kinds.append(one.cuts)
        one.took(100.0 if first else cut_s if one.cuts else whole_s)
    return one, kinds


@pytest.mark.parametrize(
    ("cut_s", "whole_s", "cuts"), [(1.0, 2.0, True), (2.0, 1.0, False), (1.0, 1.0, False)]
)
def test_the_quicker_kind_stays(cut_s: float, whole_s: float, cuts: bool) -> None:
    one, kinds = settle(cut_s, whole_s)
    assert kinds == ([True] * STEPS_OF_A_TURN + [False] * STEPS_OF_A_TURN) * 2, "in turns"
    assert one.cuts is cuts
    assert not one.took(0.0) and one.cuts is cuts, "settled is settled"


def test_a_slow_while_decides_nothing() -> None:
    """Both counted steps of the first turn of cutting, and one of the other kind."""
    one = CutOrNot()
    for seconds in (9.0, 50.0, 50.0, 9.0, 2.0, 2.0, 9.0, 1.0, 1.0, 9.0, 2.0, 50.0):
        assert not one.is_settled
        one.took(seconds)
    assert one.is_settled and one.cuts


def test_both_kinds_train_alike() -> None:
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), shapes_net)
    found = []
    for _ in range(STEPS_TO_SETTLE + 3):
        twins.train(1)
        twins.check()
        found.append(any(len(block.flats) > 1 for block in twins.blocks))
    assert True in found and False in found, "both were tried"
    twins.train(2, set_to_none=False)
    twins.check()
    for _, optimizer in twins.pairs():
        optimizer.load_state_dict(optimizer.state_dict())
    twins.train(2)
    twins.check()


def test_steps_without_the_large_ones_are_not_counted() -> None:
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), shapes_net)
    cutting = twins.step.choice.cutting
    while cutting.cuts:
        twins.train(1)
    counted = len(cutting._seconds[False])

    def remove_large(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.numel() > 1 << 19:
                parameter.grad = None

    twins.train(2 * STEPS_OF_A_TURN, between=remove_large)
    assert len(cutting._seconds[False]) == counted and not cutting.is_settled
    twins.train(STEPS_TO_SETTLE - STEPS_OF_A_TURN)
    assert cutting.is_settled
    twins.check()


@pytest.mark.parametrize(("variable", "value"), [("BAGUA_WORKER_ID", "n0.0.a"), ("WORLD_SIZE", "2")])
def test_replicas_decide_nothing_by_the_clock(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would decide for itself, and where a layout shows in the last bits they would drift apart."""
    monkeypatch.setenv(variable, value)
    assert not is_alone()
    twins = Twins(lambda params: torch.optim.AdamW(params, lr=1e-3), shapes_net)
    twins.train(3)
    laid_out = twins.laid_out
    twins.train(STEPS_TO_SETTLE)
    assert twins.laid_out == laid_out and twins.step.choice.cuts_states
    assert not twins.step.choice.cutting.is_settled
    monkeypatch.delenv(variable)
    assert is_alone()
