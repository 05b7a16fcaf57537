"""What the benchmark of sharded replicas says follows from its workers' logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.sharded import (
    Block,
    Line,
    beyond_s,
    block_of,
    lines_of,
    measured_part,
    next_step_s,
    pause_s,
    report,
)


def log(times: list[float], replicas: list[int], committed: list[int]) -> list[Line]:
    return [Line(t, c, r, 100, 0.0) for t, c, r in zip(times, committed, replicas, strict=True)]


def test_the_next_step_is_one_that_was_committed_without_the_lost_replica() -> None:
    # killed at 10.05: the step that began at 10.0 is done again at 10.3, and committed when the next begins, at 10.4
    one = log([9.9, 10.0, 10.3, 10.4], [3, 3, 2, 2], [5, 6, 6, 7])
    other = log([9.9, 10.0, 10.3, 10.45], [3, 3, 2, 2], [5, 6, 6, 7])
    assert next_step_s([one, other], 10.05, 2) == pytest.approx(0.4)
    assert next_step_s([one, other[:-1]], 10.05, 2) is None


def test_a_loss_costs_what_is_beyond_the_two_steps() -> None:
    # steps of 0.1 s with three replicas and 0.2 s with two: 0.05 s more until the step is done again, 0.01 s in it
    times = [0.0, 0.1, 0.2, 0.35, 0.56, 0.76, 0.96]
    one = log(times, [3, 3, 3, 2, 2, 2, 2], [0, 1, 2, 2, 3, 4, 5])
    assert beyond_s([one], 0.25, 2) == pytest.approx(0.06)


def test_a_pause_is_what_is_more_than_usual() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4, 0.75, 0.85, 2.0]
    one = log(times, [2] * 8, list(range(8)))
    assert pause_s([one], 0.35, 0.8, (0.0, 0.35)) == pytest.approx(0.25)


def test_a_block_leaves_the_warm_up_out(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(
        "".join(f"{k} {k} 3 {500 if k < 10 else 300} {k * 0.25}\n" for k in range(20)) + "20 20"
    )
    lines = lines_of(tmp_path / "a.log")
    assert len(lines) == 20
    assert block_of("bagua", [lines], [100]) == Block("bagua", 1.0, 0.25, 200, 400)


def test_the_ratio_is_of_pairs() -> None:
    blocks = [
        Block("hsdp", 1.0, 0, 0, 0),
        Block("bagua", 1.1, 0, 0, 0),
        Block("bagua", 2.2, 0, 0, 0),
        Block("hsdp", 2.0, 0, 0, 0),
    ]
    assert "by pairs of blocks: 1.100" in report(blocks, [])


@pytest.mark.parametrize(
    ("sleep_s", "parts", "name"),
    [
        (0.0, ["blocks", "faults"], []),
        (0.0, ["faults"], ["faults"]),
        (0.2, ["faults"], ["faults", "sleeping"]),
        (0.2, ["blocks", "faults"], ["sleeping"]),
    ],
)
def test_a_result_of_steps_that_sleep_has_a_name_of_its_own(
    sleep_s: float, parts: list[str], name: list[str]
) -> None:
    assert measured_part(sleep_s, parts) == name
