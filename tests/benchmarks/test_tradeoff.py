"""The steps that count, the table of them, and one short measurement of real jobs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from benchmarks import tradeoff, tradeoff_plots, tradeoff_table
from benchmarks.plots import STYLES, keep_plots
from benchmarks.tradeoff_systems import HOSTS, SYSTEMS, Condition, Job, Run, read_run
from benchmarks.tradeoff_window import Enough, Meeting, Window, WindowError, check_whole_rounds
from benchmarks.tradeoff_worker import ROUNDS, SETTINGS, mlp, write
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


@pytest.mark.parametrize("steps", [0, 99, 199, 301, 299.5])
def test_a_window_that_ends_within_a_round_is_refused(steps: float) -> None:
    with pytest.raises(WindowError, match=f"diloco has {steps:g} steps"):
        check_whole_rounds("diloco", steps, 100)
    check_whole_rounds("diloco", 300, 100)


def test_every_window_of_a_system_in_rounds_has_whole_rounds() -> None:
    for name, cycle in (("local_sgd", SETTINGS.sync_every), ("streaming_diloco_int4", SETTINGS.diloco_every)):
        enough = SYSTEMS[name].enough(Enough(0, 6, 1.0, 9.0))
        for step in range(enough.warm_up + 2, enough.warm_up + 3 * cycle):
            last = enough.last(step, 99.0, 0)
            assert last is not None
            check_whole_rounds(name, last - enough.warm_up, cycle)


def test_workers_that_train_alone_wait_for_each_other(tmp_path: Path) -> None:
    meetings = [Meeting(tmp_path, "started", 3) for _ in range(3)]
    for rank in (2, 0):
        meetings[rank].arrive(rank)
    assert not any(meeting.is_complete for meeting in meetings)
    meetings[1].arrive(1)
    assert all(meeting.is_complete for meeting in meetings)


def write_workers(out: Path, steps: list[int], seconds: float, samples: list[int]) -> None:
    """What workers write that took so many steps each, behind two that do not count, in the same time."""
    for rank, (count, own) in enumerate(zip(steps, samples, strict=True)):
        counted = [10.0 + seconds * i / count for i in range(count + 1)]
        write(out, rank, mlp(16), [8.0, 9.0, *counted], counted, [1.0] * (2 + count), ROUNDS, 4000, own)


def test_throughput_counts_the_samples_of_all_workers(tmp_path: Path) -> None:
    in_rounds = Job(SYSTEMS["diloco_rounds_int4"], SLOW, 1)
    whole = ROUNDS * SETTINGS.diloco_every * 16 * HOSTS
    uneven = [whole // 8, whole // 8, whole // 4, whole // 2]
    write_workers(tmp_path, [50, 50, 100, 200], 40.0, uneven)
    found = read_run(in_rounds, tmp_path, 16)
    assert found.samples_per_s == pytest.approx(whole / 40), (
        "rank 0 has an eighth of the samples, not a quarter"
    )
    assert sum(found.step_s) == pytest.approx(40.0)
    assert found.sent_bytes == 4000 / (ROUNDS * SETTINGS.diloco_every)
    write_workers(tmp_path, [3, 4, 5, 6], 2.0, [48, 64, 80, 96])
    assert read_run(Job(SYSTEMS["alone"], SLOW, 1), tmp_path, 16).samples_per_s == pytest.approx(288 / 2)


def run(system: str, condition: Condition, *step_s: float, repeat: int = 1) -> Run:
    losses = tuple((sum(step_s[: i + 1]), 2.0 / (i + 1)) for i in range(len(step_s)))
    per_s = 64 * len(step_s) / sum(step_s)
    rounds = 3 if system == "async" else None
    return Run(system, condition, repeat, 1000, 64, step_s, losses, 4e6, rounds, per_s)


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


def test_utilisation_is_beside_the_same_workers_alone_in_the_same_repeat() -> None:
    # the machine has half of its speed in the second repeat
    runs = [
        run("alone", SLOW, 0.5, 0.5),
        run("diloco_rounds_int4", SLOW, 0.5, 0.55),
        run("alone", SLOW, 1.0, 1.0, repeat=2),
        run("diloco_rounds_int4", SLOW, 1.0, 1.10, repeat=2),
        run("diloco_rounds_int4", SLOW, 9.0, 9.0, repeat=3),  # its run alone failed
        run("diloco_rounds_int4", DELAYED, 9.0),
    ]
    alone, beside, delayed = tradeoff_table.rows(runs)
    assert alone.utilisation == (1.0, 1.0) and alone.busy is None
    assert beside.utilisation == pytest.approx((1.0 / 1.05, 2.0 / 2.1))
    assert beside.is_utilised is True and alone.is_utilised is None
    assert delayed.utilisation == () and delayed.is_utilised is None, "nothing ran alone under this condition"
    words = tradeoff_table.in_words([beside])
    assert "| 95.2% (95.2% to 95.2%, n=2); at least 94%: yes |" in words
    missed = tradeoff_table.rows([run("alone", SLOW, 1.0), run("diloco_rounds_uint8", SLOW, 1.0, 1.2)])
    assert missed[1].is_utilised is False
    assert "| 90.9%; at least 94%: no |" in tradeoff_table.in_words(missed)


def test_the_baseline_without_communication_is_chosen_by_its_name() -> None:
    chosen = tradeoff.chosen_systems(["alone", "bagua"], ["diloco_rounds_int4"])
    assert [system.name for system in chosen] == ["alone", "diloco_rounds_int4"]
    assert [system.name for system in tradeoff.chosen_systems([], [])] == list(SYSTEMS)


def test_words_show_every_condition() -> None:
    words = tradeoff_table.in_words(tradeoff_table.rows(RUNS))
    assert words.index("## 100mbit\n") < words.index("## 100mbit, 5 ms each way\n")
    (line,) = [line for line in words.splitlines() if line.startswith("| bytegrad") and "3.60" in line]
    assert [cell.strip() for cell in line.split("|")][3:10] == [
        "25.6",
        "3.60",
        "3.3",
        "yes",
        "-",
        "-",
        "4.0 MB",
    ]


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


@pytest.mark.long
@pytest.mark.usefixtures("forked_starts")
def test_a_short_measurement_of_real_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    words = "--only ddp --only alone --only bagua --algorithm async --links 100mbit --delay-ms 2 --repeat 1"
    small = "--width 128 --batch 4 --steps 2 --window-s 0.2"
    assert tradeoff.main([*words.split(), *small.split()]) == 0
    printed = capsys.readouterr().out
    print(printed)
    lines = {line.split("|")[1].strip(): line for line in printed.splitlines() if line.startswith("|")}
    assert "1.00" in lines["ddp"].split("|")[4]
    assert float(lines["async"].split("|")[4]) > 0
    assert float(lines["async"].split("|")[8].strip("% ")) > 0
    assert float(lines["alone"].split("|")[4]) > 1, "no exchange, over links with a delay"
    assert "## 100mbit, 2 ms each way" in printed and "the relay forwarded" in printed
