"""The fit of the simulator's costs: to steps that it made itself, to a kept result, and to a short run on lab hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scaling.__main__ import main
from benchmarks.scaling.lab import calibrate, observations
from benchmarks.scaling.lab.calibration import Comparison, Fitted, compare, fit, predict
from benchmarks.scaling.lab.observations import (
    FIT,
    HELD_OUT,
    SMALL,
    Observation,
    Setting,
    is_at_most_1gbit,
)
from benchmarks.scaling.steps import step
from tests.docs.printed import printed
from tests.lab import namespaces

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
TRUE = Fitted(
    wire_share=0.95,
    transport_s_per_byte=6e-10,
    memory_s_per_byte=3e-10,
    codec_s_per_value=1e-9,
    collective_s=4e-4,
    step_s=5e-3,
    step_s_per_byte=3e-10,
    latency_s=2e-4,
)
SOME = ("gradient_allreduce", "bytegrad", "decentralized_shift_one")


def made(settings: tuple[Setting, ...]) -> list[Observation]:
    return [Observation(s, a, (predict(TRUE, s, a, 2),)) for s in settings for a in SOME]


def test_the_fit_finds_costs_that_explain_steps_it_did_not_see() -> None:
    observed = made((*FIT, HELD_OUT[0]))
    found = compare(fit(observed, 2), observed, 2)
    assert max(abs(c.error) for c in found if not c.setting.held_out) < 0.03
    held_out = [c for c in found if c.setting.held_out]
    assert len(held_out) == len(SOME)
    assert max(abs(c.error) for c in held_out) < 0.05
    wrong = compare(replace(TRUE, wire_share=0.5), observed, 2)
    assert max(c.error for c in wrong) > 0.5  # a comparison that could fail


def test_what_is_held_out_is_not_fitted() -> None:
    with pytest.raises(ValueError, match="all of them are held out"):
        fit(made(HELD_OUT[:1]), 2)


def test_the_goal_beyond_1_gbit_is_the_spread() -> None:
    slow, fast = Setting(3, "1gbit", SMALL), Setting(3, "5gbit", SMALL)
    assert Comparison(slow, "async", 1.0, 0.9, 1.2, 1.09).is_met
    assert not Comparison(slow, "async", 1.0, 0.8, 1.3, 1.2).is_met
    assert Comparison(fast, "async", 1.0, 0.8, 1.3, 1.2).is_met
    assert not Comparison(fast, "async", 1.0, 0.95, 1.05, 1.06).is_met


def test_steps_that_differ_by_design_count_by_their_mean() -> None:
    steps = (1.0,) * 9 + (11.0,)
    assert Observation(FIT[0], "local_sgd", steps).typical_s == 2.0
    assert Observation(FIT[0], "bytegrad", steps).typical_s == 1.0
    assert Observation(FIT[0], "bytegrad", steps).spread_s == (1.0, 11.0)
    assert Observation(FIT[0], "local_sgd", steps * 10).spread_s == (2.0, 2.0)


def test_no_setting_is_fitted_and_held_out() -> None:
    assert not {(s.hosts, s.rate) for s in FIT} & {(s.hosts, s.rate) for s in HELD_OUT}
    assert all(s.held_out for s in HELD_OUT) and not any(s.held_out for s in FIT)


def test_each_simulated_algorithm_is_validated_or_named_as_not() -> None:
    validated = {o.algorithm for o in observations.from_tradeoff() if is_at_most_1gbit(o.setting.rate)}
    assert validated == {*observations.ALGORITHMS, *observations.NEVER_FITTED}
    assert set(step.ALGORITHMS) == validated | observations.NOT_VALIDATED.keys()
    assert not validated & observations.NOT_VALIDATED.keys()
    page = PAGE.read_text()
    assert all(name in page for name in observations.NOT_VALIDATED)


def test_some_algorithms_are_predicted_from_the_steps_of_others() -> None:
    observed = observations.from_tradeoff()
    fitted = {o.algorithm for o in observed if not o.setting.held_out}
    assert fitted == set(observations.ALGORITHMS)
    held_out = {(o.algorithm, o.setting.rate) for o in observed if o.setting.held_out}
    rates = ("100mbit", "1gbit", "10gbit")
    assert held_out == {(name, rate) for name in observations.NEVER_FITTED for rate in rates} | {
        (name, "1gbit") for name in observations.ALGORITHMS
    }


def test_kept_steps_of_tradeoff_are_predicted_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--calibrate-kept"]) == 0
    told = capsys.readouterr().out
    assert "up to 1 Gbit/s: 13 of 14 within 10%" in told and "beyond: 2 of 3 within the spread" in told
    page = " ".join(PAGE.read_text().split())
    assert "13 of 14 are predicted within 10 %" in page and "2 of 3 within the spread" in page
    rows = [line for line in told.splitlines() if "held out |" in line]
    far = {tuple(row.split("|")[i].strip() for i in (1, 2, 6)) for row in rows if "| no " in row}
    assert {(where.split(", ")[1], name) for where, name, _ in far} == {
        ("1gbit", "qadam_1bit"),
        ("10gbit", "ddp_fp16"),
    }
    for _, name, error in far:
        # the page rounds it, and has it in words
        assert f"`{name}`" in page and f"{abs(round(float(error.rstrip('%'))))} % too" in page
    assert all(f"- not validated: {name}, " in told for name in observations.NOT_VALIDATED)


def test_kept_steps_of_the_lab_are_predicted_as_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """A link's burst of 256 KiB is a tenth of what ByteGrad sends in a step: without it, its steps on 3 and 4 hosts
    were predicted 11 to 13 % too slow over 1 Gbit/s and less. What still differs are six hosts on two processors."""
    module, *words = printed("docs/scaling.md", "benchmarks.scaling --calibrate-kept lab")[1:]
    assert module == "benchmarks.scaling" and main(words) == 0
    told = capsys.readouterr().out
    assert "up to 1 Gbit/s: 14 of 16 within 10%" in told and "beyond: 8 of 8 within the spread" in told
    rows = [line for line in told.splitlines() if " hosts, " in line and line.startswith("|")]
    assert all("| yes |" in row for row in rows if "bytegrad" in row)
    assert all("6 hosts" in row for row in rows if "held out" in row and "| no " in row)


@pytest.mark.long
def test_a_tiny_calibration_on_lab_hosts(
    kept_in: Path, capsys: pytest.CaptureFixture[str], forked_starts: None
) -> None:
    """The mechanics: real jobs are started and measured, and each gets a prediction."""
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    module, *words = printed("docs/scaling.md", "benchmarks.scaling --calibrate ")[1:]
    small = ["--tiny", "--algorithm", "gradient_allreduce", "--algorithm", "bytegrad"]
    assert module == "benchmarks.scaling" and main([*words, *small]) == 0
    assert {path.suffix for path in kept_in.iterdir()} == {".md", ".json", ".png"}
    told = capsys.readouterr().out
    assert "2 hosts, 1gbit, 0.1 M parameters" in told
    assert told.count("fitted") >= 2


@pytest.mark.long
def test_a_kept_result_is_calibrated_as_the_page_prints_it(
    kept_in: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = printed("docs/scaling.md", "benchmarks.scaling --calibrate-kept --keep")[1:]
    assert module == "benchmarks.scaling" and main(words) == 0
    assert {path.suffix for path in kept_in.iterdir()} == {".md", ".json", ".png"}
    assert "the kept result tradeoff" in capsys.readouterr().out


def test_the_report_says_how_busy_the_processors_were() -> None:
    four = Setting(4, "1gbit", SMALL)
    (found,) = compare(TRUE, [Observation(four, "bytegrad", (0.1, 0.3), processor_s=0.05)], 2)
    assert found.busy == pytest.approx(4 * 0.05 / (2 * 0.2))
    assert "| 50% " in calibrate.in_words(TRUE, [found], kept="")


def test_the_report_counts_what_is_met(capsys: pytest.CaptureFixture[str]) -> None:
    observed = made((FIT[1], HELD_OUT[0]))
    words = calibrate.in_words(TRUE, compare(TRUE, observed, 2), kept="")
    assert f"held out, up to 1 Gbit/s: {len(SOME)} of {len(SOME)} within 10%" in words
