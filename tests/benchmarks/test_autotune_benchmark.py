"""What the report of benchmarks.autotune says of parts that have run."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from bagua_agent.autotune.space import LEAST_EXPONENT
from bagua_agent.autotune.study_records import Phase, Study, Trial
from bagua_contract.step_settings import StepSettings
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB
from benchmarks import autotune, autotune_worker, kept_plots
from benchmarks.autotune import in_words, is_met, merged
from benchmarks.autotune_job import MODELS

ABOUT = {"date": "2026-11-27T12:00:00+00:00", "commit": "abc", "load_at_start": 0.1}
GRID = {
    "about": ABOUT,
    "part": "grid",
    "link": "1gbit",
    "model": "wide",
    "rates": {"as the script says": 10.0, "buckets of 1 MiB": 20.0},
}
TUNE = {
    "about": ABOUT,
    "part": "tune",
    "link": "1gbit",
    "model": "wide",
    "kept": "buckets of 1 MiB",
    "trials": [{}],
    "lost_share": 0.04,
}


def test_kept_settings_are_compared_by_their_rates_in_the_grid() -> None:
    said = in_words([GRID, TUNE])
    assert "buckets of 1 MiB" in said and "+100.0%" in said and "| yes |" in said
    assert "| no  |" in in_words([GRID, {**TUNE, "kept": "as the script says"}])


def test_a_study_without_its_grid_is_named() -> None:
    assert "no grid has buckets of 1 MiB" in in_words([TUNE])


def test_the_time_after_a_drop_is_said() -> None:
    grid = {**GRID, "link": "100mbit"}
    seen = [{"after_s": 10.0, "rate": 5.0}, {"after_s": 40.0, "rate": 18.5}]
    drop = {"part": "drop", "link": "1gbit", "model": "wide", "seen": seen, "about": ABOUT}
    assert "90% of the new best after 40 s" in in_words([grid, drop])
    assert "90% of the new best never" in in_words([grid, {**drop, "seen": seen[:1]}])
    assert "no grid of 100mbit to compare with" in in_words([drop])


PROPOSE = {
    "about": ABOUT,
    "part": "propose",
    "link": "100mbit",
    "model": "wide",
    "proposed": "bytegrad",
    "is_worth_it": True,
    "instead_of": "gradient_allreduce",
    "instead_of_s": 0.48,
    "after_switch_s": 0.12,
    "bytes_per_s": 12.3e6,
    "latency_s": 0.0,
    "compute_s": 0.03,
    "predicted_s": {"gradient_allreduce": 0.45, "bytegrad": 0.13, "qadam": 0.14},
    "pinned_s": {"gradient_allreduce": 0.5, "bytegrad": 0.125, "qadam": 0.16},
}


def test_a_proposal_is_shown_beside_what_each_algorithm_takes() -> None:
    said = in_words([PROPOSE])
    assert "| bytegrad           | proposed     | 130.0 ms        | 125.0 ms     | +4%   |" in said
    assert "level 2 proposes bytegrad instead of gradient_allreduce, from 12.3 MB/s" in said
    assert "predicted 130.0 ms, 120.0 ms a step after the switch, 480.0 ms before it" in said
    assert "bytegrad is the fastest" in said
    assert "no switch was measured" in in_words([{**PROPOSE, "after_switch_s": 0.0, "is_worth_it": False}])
    assert set(kept_plots.autotune([GRID, PROPOSE])) == {"rates", "proposals"}
    assert set(kept_plots.autotune([GRID])) == {"rates"}


def test_a_part_that_ran_again_replaces_the_kept_one_and_drops_no_other() -> None:
    again = {**TUNE, "kept": "as the script says", "settled": False}
    deep = {**GRID, "model": "deep"}
    parts = merged([GRID, TUNE, deep], [again])
    assert parts == [deep, GRID, again]
    said = in_words(parts)
    assert (
        "grid, 1gbit, deep: 2026-11-27T12:00:00+00:00, commit abc" in said and "not settled in time" in said
    )


@pytest.mark.parametrize(
    ("kept", "best", "scripted", "lost_share", "met"),
    [
        (20.0, 20.0, 10.0, 0.04, True),
        (18.9, 20.0, 10.0, 0.04, False),
        (20.0, 20.0, 10.0, 0.06, False),
        (10.0, 10.5, 10.0, 0.0, True),
        (9.9, 10.0, 10.0, 0.0, False),
        (11.5, 12.0, 11.0, 0.0, True),
    ],
)
def test_what_is_asked_for(kept: float, best: float, scripted: float, lost_share: float, met: bool) -> None:
    assert is_met(kept, best, scripted, lost_share) is met


def test_a_script_whose_buckets_are_wrong_differs_from_the_other_in_nothing_else() -> None:
    wrong, usual = (
        autotune_worker.options_of(["--log", "steps.log", *MODELS[name].worker_options])
        for name in ("deep_16kib", "deep")
    )
    assert (wrong.layers, wrong.width) == (usual.layers, usual.width)
    assert wrong.bucket_bytes == 1 << LEAST_EXPONENT  # the least that a study tries
    assert usual.bucket_bytes == DEFAULT_BUCKET_CAP_MB * 2**20


def test_of_a_script_whose_buckets_are_wrong_the_gain_must_be_had() -> None:
    grid = {**GRID, "model": "deep_16kib"}
    tune = {**TUNE, "model": "deep_16kib"}
    assert "deep_16kib" in in_words([grid, tune]) and "| yes |" in in_words([grid, tune])
    assert "| no  |" in in_words([grid, {**tune, "kept": "as the script says"}])


@pytest.mark.parametrize(
    ("model", "phase", "when"),
    [
        ("wide", Phase.SETTLED, "once the study had settled"),
        ("wide", Phase.TRYING, "after 1 trial, before the study had settled"),
        ("deep_16kib", Phase.SETTLED, "before the first trial"),
    ],
)
def test_a_link_drops_once_the_study_has_settled_or_before_its_first_trial(
    model: str, phase: Phase, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = replace(Study(), number=1, phase=phase, trials=(Trial(StepSettings(), 10, 1.0),))
    job = Mock(model=model)
    job.settled_or_last.return_value = tried
    job.study.return_value = replace(Study(), number=1)
    job.rate.return_value = 1.5
    monkeypatch.setattr(autotune, "DROP_WITHIN_S", 0.04)
    lab = Mock()
    found = autotune.drop(job, lab, tiny=True)
    lab.shape.assert_called_once_with("100mbit")
    assert found["trials_before"] == (1 if model == "wide" else 0)
    assert found["seen"][0]["rate"] == 1.5
    about_part = {"part": "drop", "link": "1gbit", "model": model, "about": ABOUT}
    words = in_words([{**GRID, "model": model, "link": "100mbit"}, {**about_part, **found}])
    assert f"drop to 100mbit {when}:" in words
    assert found["settled_before"] == (when == "once the study had settled")


def test_models_are_small_enough_for_slow_links() -> None:
    assert all(shape.gradient_bytes <= 4_000_000 for shape in MODELS.values())
