"""While checkpoints fail for lack of room, what earlier attempts left does not take the room of the next one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bagua_core.elastic.checkpoint import catalogue
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.storage import Storage
from tests.core.elastic.checkpoint.checkpoint_worlds import Rank, together, world


class FullDisk(LocalStorage):
    """Has no room for the parts of these steps whose number is `part`."""

    def __init__(self, root: Path, part: int, steps: Sequence[int]) -> None:
        super().__init__(root)
        self._without_room = [(f"-step-{step:09d}-", f"/part-{part:05d}-") for step in steps]

    def write(
        self,
        name: str,
        pieces: Sequence[bytes | memoryview],
        at_edge: Callable[[str], None] = lambda edge: None,
    ) -> None:
        if any(step in name and part in name for step, part in self._without_room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(name, pieces, at_edge)


def on_disk(root: Path, *, complete: bool) -> list[int]:
    return [f.place.name.step for f in catalogue.find(LocalStorage(root)) if f.is_complete is complete]


def both_written(ranks: Sequence[Rank], steps: int) -> None:
    """One checkpoint after another, so that rank 0 sees the parts of the ones before."""
    for _ in range(steps // 2):
        together(ranks, 2)


def test_attempts_that_failed_are_removed_before_the_next_one(tmp_path: Path) -> None:
    ranks = world(FullDisk(tmp_path, 1, [6, 8, 10]), 2)
    together(ranks, begin=True)
    both_written(ranks, 10)
    assert on_disk(tmp_path, complete=True) == [4, 2] and on_disk(tmp_path, complete=False) == [10]
    both_written(ranks, 4)
    assert on_disk(tmp_path, complete=True)[:2] == [14, 12] and not on_disk(tmp_path, complete=False)


def test_the_first_attempts_are_removed_too(tmp_path: Path) -> None:
    ranks = world(FullDisk(tmp_path, 0, [2, 4, 6]), 2)
    together(ranks, begin=True)
    both_written(ranks, 8)
    assert on_disk(tmp_path, complete=True) == [8] and not on_disk(tmp_path, complete=False)


def test_a_third_complete_one_is_removed_though_part_0_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 looked before the others had written, so it removed one too few."""
    ranks = world(FullDisk(tmp_path, 0, [8, 10]), 2)
    together(ranks, begin=True)
    both_written(ranks, 4)
    with monkeypatch.context() as patched:
        patched.setattr(ranks[0].checkpointer.writer, "_prune", lambda before: None)
        both_written(ranks, 2)
    both_written(ranks, 4)
    assert on_disk(tmp_path, complete=True) == [6, 4] and on_disk(tmp_path, complete=False) == [10]


def test_what_a_lost_worker_left_unfinished_stays_while_no_write_fails(tmp_path: Path) -> None:
    ranks = world(FullDisk(tmp_path, 1, [8]), 2)
    together(ranks, begin=True)
    both_written(ranks, 4)
    newest = catalogue.find(LocalStorage(tmp_path))[0].place.directory_name
    (tmp_path / newest / "part-00001-of-00002.safetensors").unlink()
    both_written(ranks, 2)
    assert on_disk(tmp_path, complete=False) == [4], "it may still be under way"
    both_written(ranks, 4)
    assert on_disk(tmp_path, complete=True)[0] == 10 and not on_disk(tmp_path, complete=False)


def test_a_last_checkpoint_removes_no_attempt(tmp_path: Path) -> None:
    """Others may be writing parts of an older state then."""
    ranks = world(FullDisk(tmp_path, 1, [2]), 2)
    together(ranks, 3, begin=True)
    together(ranks, end=True)
    assert on_disk(tmp_path, complete=True) == [3] and on_disk(tmp_path, complete=False) == [2]


def test_a_checkpoint_that_only_looks_unfinished_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a mount whose listings lag: the parts of other hosts are there, and not seen for a while."""
    storage = FullDisk(tmp_path, 1, [6])
    ranks = world(storage, 2)
    together(ranks, begin=True)
    both_written(ranks, 6)
    find = catalogue.find
    looks = 0

    def lagging(seen: Storage) -> list[catalogue.Found]:
        nonlocal looks
        looks += 1
        return [
            replace(f, headers=(), reason="a part is missing") if f.place.name.step == 4 else f
            for f in find(seen)
        ]

    with monkeypatch.context() as patched:
        patched.setattr(catalogue, "find", lagging)
        both_written(ranks, 2)
    assert looks
    assert 4 in on_disk(tmp_path, complete=True)


def test_the_parts_of_others_go_where_part_0_has_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world(LocalStorage(tmp_path), 2)
    together(ranks, begin=True)
    both_written(ranks, 2)

    def none_left(stripe: object) -> None:
        raise MemoryError

    monkeypatch.setattr(ranks[0].checkpointer.writer, "_staged", none_left)
    both_written(ranks, 8)
    assert on_disk(tmp_path, complete=True) == [2] and on_disk(tmp_path, complete=False) == [10]
