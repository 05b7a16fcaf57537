"""The benchmark of cached data sets: what its rows say, and one short run of all of it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import cached_dataset
from benchmarks.cached_dataset import AIM_MEMORY, AIM_SECOND, HEAD, Row
from benchmarks.cached_dataset_samples import KINDS


def row(num_workers: int, first_s: float, later_s: list[float], memory_s: list[float]) -> Row:
    return Row(
        "images",
        num_workers,
        100,
        9.0,
        {"embedded": first_s},
        {"embedded": later_s, "memory": memory_s},
        {"embedded": 1.0},
    )


def test_what_a_row_says() -> None:
    one = row(2, 10.0, [0.5, 9.0, 0.4], [0.4, 0.4, 0.1])
    assert one.per_s("embedded") == 200 and one.saves("embedded") == 20 and one.of_memory("embedded") == 0.8
    assert len(one.cells("embedded")) == len(HEAD)


def test_the_aims_are_of_loaders_with_processes() -> None:
    good, slow = row(2, 10.0, [0.5], [0.4]), row(0, 10.0, [5.0], [0.4])
    assert cached_dataset.verdict([good, slow])[1]
    assert not cached_dataset.verdict([good, row(2, 10.0, [1.1], [1.0])])[1], f"not {AIM_SECOND:g} times"
    assert not cached_dataset.verdict([good, row(2, 10.0, [0.5], [0.39])])[1], f"not {AIM_MEMORY:g} of memory"
    assert not cached_dataset.verdict([slow])[1]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_the_same_every_time(kind: str) -> None:
    one, other = KINDS[kind](5), KINDS[kind](5)
    assert torch.equal(one[3][0], other[3][0]) and one[3][1] == other[3][1] == 3
    assert not torch.equal(one[3][0], one[4][0])


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    code = cached_dataset.main(["--samples", "40", "--rounds", "1", "--kind", "tokens"])
    torch.set_num_threads(threads)
    said = capsys.readouterr().out
    assert code in (0, 1) and said.count("| tokens") == 4 and "in loaders with processes" in said
    assert said.count("redis") == 2 or "redis-server is not installed" in said
