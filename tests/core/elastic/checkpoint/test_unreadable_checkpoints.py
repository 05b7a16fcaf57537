"""Checkpoints that cannot be read, for a moment or always: none is voided, removed or passed over silently."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from bagua_core.elastic.checkpoint import part_file
from bagua_core.elastic.checkpoint.restore import CheckpointsUnreadable
from tests.core.elastic.checkpoint.checkpoint_worlds import FailingStorage, steps_on_disk, together, world


def test_a_directory_that_cannot_be_read_is_no_beginning(tmp_path: Path) -> None:
    (tmp_path / "run-0001.json").write_text("{")
    with pytest.raises(CheckpointsUnreadable):
        together(world(tmp_path, 1), begin=True)


def test_a_directory_that_is_missing_and_cannot_be_made_is_no_beginning(tmp_path: Path) -> None:
    """A mount that is not there at a start, and comes back."""
    mount, away, root = tmp_path / "mount", tmp_path / "away", tmp_path / "demo"
    mount.mkdir()
    root.symlink_to(mount)
    together(world(root, 1), 4, begin=True)
    mount.rename(away)
    ranks = world(root, 1)
    with pytest.raises(CheckpointsUnreadable, match="start with another --checkpoint-dir"):
        together(ranks, begin=True)
    away.rename(mount)
    together(ranks, begin=True)
    assert ranks[0].name.step == 4


def test_a_run_s_file_that_vanishes_behind_its_listing_is_no_beginning(tmp_path: Path) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    storage = FailingStorage(tmp_path, "open", errno.ENOENT)
    storage.unreadable = "run-0001.json"
    with pytest.raises(CheckpointsUnreadable, match="No such file"):
        together(world(storage, 1), begin=True)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN])
@pytest.mark.parametrize("where", ["list", "open"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_voided(
    tmp_path: Path, where: str, number: int
) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    storage = FailingStorage(tmp_path, where, number)
    storage.unreadable = "run-0001-step-000000004"
    with pytest.raises(CheckpointsUnreadable, match="run-0001-step-000000004"):
        together(world(storage, 1), begin=True)
    assert steps_on_disk(tmp_path) == [4, 2]
    again = world(storage, 1)
    storage.unreadable = ""
    together(again, begin=True)
    assert again[0].name.step == 4


def test_none_is_removed_while_a_newer_one_cannot_be_read(tmp_path: Path) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    storage = FailingStorage(tmp_path, "open", errno.ESTALE)
    (rank,) = world(storage, 1)
    together([rank], begin=True)
    storage.unreadable = "run-0002-step-000000006"
    together([rank], 4)
    assert any("could not be removed" in text for text in rank.said)
    assert steps_on_disk(tmp_path) == [8, 6, 4, 2]
    storage.unreadable = ""
    together([rank], 2)
    assert steps_on_disk(tmp_path) == [10, 8]


@pytest.mark.parametrize("where", ["list", "open"])
def test_the_job_goes_on_from_one_that_is_newer_than_what_cannot_be_read(tmp_path: Path, where: str) -> None:
    together(world(tmp_path, 2), 4, begin=True)
    storage = FailingStorage(tmp_path, where, errno.EIO)
    storage.unreadable = "run-0001-step-000000002"
    ranks = world(storage, 2)
    together(ranks, begin=True)
    assert [rank.name.step for rank in ranks] == [4, 4]


def test_what_is_older_than_one_that_cannot_be_read_is_not_chosen_instead(tmp_path: Path) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    (path,) = tmp_path.glob("run-0001-step-000000004-*/part-*")
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")  # only reading shows it
    storage = FailingStorage(tmp_path, "open", errno.EACCES)
    storage.unreadable = "run-0001-step-000000002"
    with pytest.raises(CheckpointsUnreadable, match="run-0001-step-000000002"):
        together(world(storage, 1), begin=True)


def test_removal_goes_on_beside_an_older_one_that_cannot_be_read(tmp_path: Path) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    storage = FailingStorage(tmp_path, "open", errno.EIO)
    storage.unreadable = "run-0001-step-000000002"
    (rank,) = world(storage, 1)
    together([rank], 4, begin=True)
    assert steps_on_disk(tmp_path) == [8, 6, 2]
    storage.unreadable = ""
    together([rank], 2)
    assert steps_on_disk(tmp_path) == [10, 8]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError()])
def test_a_chosen_one_that_cannot_be_read_for_a_moment_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    together(world(tmp_path, 1), 4, begin=True)
    ranks = world(tmp_path, 1)

    def fail(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(part_file, "read_data", fail)
        with pytest.raises(CheckpointsUnreadable, match="run-0001-step-000000004"):
            together(ranks, begin=True)
    assert steps_on_disk(tmp_path) == [4, 2]


def test_without_memory_for_the_state_no_older_one_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(world(tmp_path, 1), 4, begin=True)

    def without_memory(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes")

    ranks = world(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", without_memory)
        with pytest.raises(CheckpointsUnreadable, match="memory"):
            ranks[0].begin()
