"""The tasks are what they should be, the table judges rightly, and short trainings come out as DDP's do."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bagua_core.communication.compressed.compressed_sum import LEAST_ELEMENTS
from benchmarks import fidelity, fidelity_plots, fidelity_table
from benchmarks.algorithm_choices import CHOICES
from benchmarks.fidelity_runs import Trained, TrainingFailed, baseline_of, train
from benchmarks.fidelity_tasks import TASKS, save_pieces
from benchmarks.plots import STYLES, keep_plots


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_are_whole_batches_and_large_enough_to_be_compressed(name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    task = TASKS[name]
    training, held_out = task.pieces()
    assert len(training) % task.global_batch == 0 and len(held_out) > 100
    torch.manual_seed(0)
    model = task.build()
    assert sum(p.numel() for p in model.parameters()) > 2 * LEAST_ELEMENTS
    classes = {"digits": 10, "words": 20}.get(name, 128)
    # untrained it guesses, more or less: initial weights are not quite impartial
    assert task.loss_over(model, held_out) == pytest.approx(math.log(classes), rel=0.25)


def test_algorithms_are_compared_with_ddp_of_their_optimizer() -> None:
    digits, characters = TASKS["digits"], TASKS["characters_adam"]
    assert fidelity.systems_for(digits, ["bytegrad", "qadam_1bit"]) == [
        "ddp_sgd",
        "ddp_adam",
        "bytegrad",
        "qadam_1bit",
    ]
    assert fidelity.systems_for(digits, ["power_sgd"]) == ["ddp_sgd", "ddp_powersgd", "power_sgd"]
    assert baseline_of("ddp_powersgd", digits) == "ddp_sgd"
    assert fidelity.systems_for(characters, []) == ["ddp_adam", "ddp_powersgd", *CHOICES]
    assert {"ddp_sgd", "ddp_adam", "ddp_powersgd", *CHOICES} <= set(STYLES)


def trained(system: str, seed: int, train_loss: float, held_out_loss: float) -> Trained:
    rounds, sent_bytes = (2, 100.0) if system == "async" else (None, 4000.0)
    return Trained("digits", system, seed, train_loss, held_out_loss, (2.0, 1.0), rounds, sent_bytes)


TRAINED = [
    trained("ddp_sgd", 0, 0.10, 1.0),
    trained("ddp_sgd", 1, 0.20, 2.0),
    trained("bytegrad", 0, 0.103, 1.0),
    trained("bytegrad", 1, 0.200, 2.0),
    trained("async", 0, 0.09, 1.03),
    trained("async", 1, 0.20, 2.03),
    trained("local_sgd", 0, math.nan, 1.0),
    trained("local_sgd", 1, 0.2, 2.0),
]


def test_ratios_are_taken_seed_by_seed() -> None:
    ddp, bytegrad, other, lost = fidelity_table.rows(TRAINED)
    assert ddp.train_ratio == (1.0, 1.0)
    assert bytegrad.train_ratio == pytest.approx((1.03, 1.0)) and bytegrad.is_within
    assert other.held_out_ratio == pytest.approx((1.03, 1.015)) and other.is_within is False
    assert lost.is_within is False, "a loss that is no number is not near DDP's"
    assert (ddp.step_bytes, other.step_bytes, other.fewer) == (2000.0, 50.0, 40.0)
    words = fidelity_table.in_words([ddp, bytegrad, other, lost])
    assert "1.015 (1.000 to 1.030)" in words and "async (a round every 1.0 steps)" in words


def test_without_a_baseline_nothing_is_judged() -> None:
    (row,) = fidelity_table.rows(TRAINED[2:4])
    assert row.train_ratio == () and row.is_within is None and row.fewer is None


def test_rounds_of_diloco_fit_into_a_short_training() -> None:
    every = {steps: TASKS["characters"].settings_for(steps).diloco_every for steps in (30, 400, 2048)}
    assert every == {30: 10, 400: 20, 2048: 100}


def test_fidelity_plots_lie_beside_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / "fidelity-today.md"
    table.write_text("# words\n")
    paths = keep_plots(table, fidelity_plots.figures(fidelity_table.rows(TRAINED), TRAINED))
    assert [p.name for p in paths] == ["fidelity-today-loss.png", "fidelity-today-ratio.png"]
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in paths)


@pytest.fixture
def characters(tmp_path: Path) -> Path:
    saved = tmp_path / "characters.pt"
    save_pieces(TASKS["characters"].pieces(), saved)
    return saved


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_short_trainings_come_out_as_under_ddp(tmp_path: Path, characters: Path) -> None:
    task, losses, curves, sent = TASKS["characters"], {}, {}, {}
    for system in ("ddp_sgd", "gradient_allreduce", "bytegrad"):
        (found,) = train(task, system, [0], 1, characters, tmp_path / system)
        losses[system], curves[system] = found.train_loss, found.curve
        sent[system] = found.sent_bytes / len(found.curve)
    print(f"measured: {losses}")
    assert {len(curve) for curve in curves.values()} == {30}
    assert curves["ddp_sgd"][-1] < curves["ddp_sgd"][0] - 1
    # the same samples, weights and dropout: what is left are roundings
    assert losses["gradient_allreduce"] == pytest.approx(losses["ddp_sgd"], rel=1e-3)
    assert losses["bytegrad"] == pytest.approx(losses["ddp_sgd"], rel=0.02)
    # 44,000 parameters: a ring of four sends each of them 1.5 times
    assert sent["ddp_sgd"] == pytest.approx(1.5 * 4 * 44_000, rel=0.2)
    assert sent["bytegrad"] < 0.4 * sent["ddp_sgd"]
    assert losses["bytegrad"] != losses["gradient_allreduce"], "nothing was compressed"


@pytest.mark.usefixtures("forked_starts")
def test_a_training_that_fails_is_reported(tmp_path: Path, characters: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"(?s)exit 1> failed\n.*0 steps instead of -30"):
        train(TASKS["characters"], "gradient_allreduce", [0], -1, characters, tmp_path / "out")
