"""Logs of workers that were replaced: what is kept of a slot, and that nothing else is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_agent.workers.output.earlier_logs import MOST_EARLIER, EarlierLogs, too_many


@pytest.mark.parametrize(
    ("sizes", "gone"),
    [
        ([], 0),
        ([60, 40], 0),
        ([60, 41], 1),
        ([10, 20, 200], 2),
        ([200], 0),
        ([1] * (MOST_EARLIER + 2), 2),
        ([0] * MOST_EARLIER, 0),
    ],
)
def test_the_oldest_go_first(sizes: list[int], gone: int) -> None:
    assert too_many(sizes, 100) == gone


def worker(tmp_path: Path, slot: int, number: int, size: int) -> Path:
    directory = tmp_path / f"slot{slot}-{number}"
    directory.mkdir()
    (directory / "stdout.log").write_bytes(bytes(size // 2))
    (directory / "stdout.log.5").write_bytes(bytes(size // 2))
    return directory


def test_a_slot_whose_workers_end_again_and_again_fills_no_disk(tmp_path: Path) -> None:
    stranger = worker(tmp_path, 0, 99, 500)
    logs = EarlierLogs(most_log_bytes=100)
    for number in range(10):
        logs.begin(0, worker(tmp_path, 0, number, 100))
        logs.begin(1, worker(tmp_path, 1, number, 10))
    left = {path.name for path in tmp_path.iterdir()} - {stranger.name}
    assert left == {"slot0-7", "slot0-8", "slot0-9"} | {f"slot1-{n}" for n in range(10)}
    assert stranger.is_dir()


def test_one_that_was_removed_by_hand_is_no_trouble_and_without_a_bound_all_stay(tmp_path: Path) -> None:
    logs = EarlierLogs(most_log_bytes=10)
    for number in range(3):
        logs.begin(0, tmp_path / f"gone-{number}")
    unbounded = EarlierLogs(most_log_bytes=0)
    for number in range(3):
        unbounded.begin(0, worker(tmp_path, 0, number, 1000))
    assert len(list(tmp_path.iterdir())) == 3
