"""The steps that count, the table of them, and one short measurement of real jobs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import tradeoff, tradeoff_plots, tradeoff_table
from benchmarks.plots import STYLES, keep_plots
from benchmarks.tradeoff_systems import SYSTEMS, Condition, Run
from benchmarks.tradeoff_window import Enough, Window
from tests.lab import namespaces

SLOW, DELAYED = Condition("100mbit"), Condition("100mbit", 5.0)


@pytest.mark.parametrize(
    ("enough", "step", "elapsed_s", "rounds", "last"),
    [
        (Enough(2, 3, 1.0, 9.0), 4, 5.0, 0, None),  # two steps of three
        (Enough(2, 3, 1.0, 9.0), 5, 0.5, 0, None),  # too soon
        (Enough(2, 3, 1.0, 9.0), 5, 1.0, 0, 6),
        (Enough(2, 9, 1.0, 9.0), 4, 9.0, 0, 5),  # it takes too long
        (Enough(2, 9, 1.0, 9.0), 3, 20.0, 0, None),  # but one step says nothing
        (Enough(2, 3, 1.0, 9.0, rounds=4), 8, 5.0, 3, None),
        (Enough(2, 3, 1.0, 9.0, rounds=4), 8, 5.0, 4, 9),
        (Enough(2, 3, 1.0, 9.0, cycle=8), 5, 5.0, 0, 10),  # 8 that count
        (Enough(2, 3, 1.0, 9.0, cycle=8), 9, 5.0, 0, 10),
        (Enough(2, 3, 1.0, 9.0, cycle=8), 10, 5.0, 0, 18),
    ],
)
def test_when_it_is_enough(
    enough: Enough, step: int, elapsed_s: float, rounds: int, last: int | None
) -> None:
    assert enough.last(step, elapsed_s, rounds) == last


@pytest.mark.parametrize("first", [0, 1])
def test_workers_stop_before_the_same_step_in_any_order(tmp_path: Path, first: int) -> None:
    now_s = 0.0
    windows = [
        Window(Enough(1, 3, 2.0, 60.0), tmp_path / "stop", decides=rank == 0, clock=lambda: now_s)
        for rank in range(2)
    ]
    for step in range(5):
        assert [windows[rank].goes_on() for rank in (first, 1 - first)] == [True, True], step
        now_s += 1.0
        for window in windows:
            window.trained(0.5)
    assert [windows[rank].goes_on() for rank in (first, 1 - first)] == [False, False]
    assert windows[0].step_s == windows[1].step_s == [1.0] * 4


def run(system: str, condition: Condition, *step_s: float, repeat: int = 1) -> Run:
    losses = tuple((sum(step_s[: i + 1]), 2.0 / (i + 1)) for i in range(len(step_s)))
    return Run(system, condition, repeat, 1000, 64, step_s, losses, 4e6, 3 if system == "async" else None)


RUNS = [
    run("ddp", SLOW, 9.0, 8.0, 20.0),
    run("bytegrad", SLOW, 2.5, 2.0, 3.5),
    run("async", SLOW, 0.1, 0.1, 0.7),
    run("async", SLOW, 0.1, 0.1, 1.3, repeat=2),
    run("ddp", DELAYED, 10.0),
    run("bytegrad", DELAYED, 2.0),
]


def test_rows_compare_with_ddp_under_the_same_condition() -> None:
    found = {(row.system, row.condition): row for row in tradeoff_table.rows(RUNS)}
    assert found["ddp", SLOW].step_s == 9.0
    bytegrad = found["bytegrad", SLOW]
    assert (bytegrad.step_s, bytegrad.samples_per_s, bytegrad.ratio) == (2.5, 64 / 2.5, 9.0 / 2.5)
    assert bytegrad.is_reached is True
    uneven = found["async", SLOW]
    assert uneven.step_s == pytest.approx(0.4), "the mean, as its dear steps are part of its cost"
    assert uneven.ratio == pytest.approx(22.5) and uneven.rounds == 6
    assert found["bytegrad", DELAYED].ratio == 5.0
    assert found["bytegrad", DELAYED].is_reached is None, "the aims are for links without delay"


def test_an_aim_is_missed_by_a_hundredth() -> None:
    assert SYSTEMS["gradient_allreduce"].aims["100mbit"] == 1.0
    for own_s, reached in ((1.004, True), (1.02, False)):
        runs = [run("ddp", SLOW, 1.0), run("gradient_allreduce", SLOW, own_s)]
        assert tradeoff_table.rows(runs)[1].is_reached is reached


def test_words_show_every_condition() -> None:
    words = tradeoff_table.in_words(tradeoff_table.rows(RUNS))
    assert words.index("## 100mbit\n") < words.index("## 100mbit, 5 ms each way\n")
    (line,) = [line for line in words.splitlines() if line.startswith("| bytegrad") and "3.60" in line]
    assert [cell.strip() for cell in line.split("|")][3:9] == ["25.6", "3.60", "3.3", "yes", "-", "4.0 MB"]


def test_plots_lie_beside_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    table = tmp_path / "tradeoff-today.md"
    table.write_text("# words\n")
    runs = [*RUNS, run("ddp", Condition("1gbit"), 1.0), run("async", Condition("1gbit"), 0.1, math.nan)]
    paths = keep_plots(table, tradeoff_plots.figures(tradeoff_table.rows(RUNS), runs))
    assert [p.name for p in paths] == [
        f"tradeoff-today-{n}.png" for n in ("throughput", "epoch-time", "loss")
    ]
    for path in paths:
        assert path.read_bytes()[:4] == b"\x89PNG"
        assert f"]({path.name})" in table.read_text()


def test_every_system_has_a_look() -> None:
    assert set(SYSTEMS) <= set(STYLES)


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("2.5gbit", 2.5e9), ("64kbit", 64e3)])
def test_rates_are_read_as_tc_does(rate: str, bits: float) -> None:
    assert tradeoff_plots.bits_per_s(rate) == bits


@pytest.mark.usefixtures("forked_starts")
def test_a_short_measurement_of_real_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    words = "--only ddp --only bagua --algorithm async --links 100mbit --delay-ms 2 --repeat 1"
    small = "--width 128 --batch 4 --steps 2 --window-s 0.2"
    assert tradeoff.main([*words.split(), *small.split()]) == 0
    printed = capsys.readouterr().out
    print(printed)
    lines = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    assert "1.00" in lines["ddp"].split("|")[4]
    assert float(lines["async"].split("|")[4]) > 0
    assert "## 100mbit, 2 ms each way" in printed and "the relay forwarded" in printed
