"""Nodes whose --checkpoint-dir is a directory of each: the start is refused, and parts that stay missing are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua_core.elastic.checkpoint import restore
from bagua_core.elastic.checkpoint.local_storage import LocalStorage
from bagua_core.elastic.checkpoint.restore import CheckpointsUnreadable, Choice
from bagua_core.elastic.checkpoint.writer import LISTING_LAG_S, Saved
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.checkpoint.checkpoint_worlds import DEADLINE_S, Rank, together
from tests.core.elastic.checkpoint.test_job_checkpoints import Worker, settings
from tests.core.elastic.records import generation


def test_a_member_that_has_another_directory_than_rank_0_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_DELAYS_S", ())
    record = generation(1, "w0", "w1", base=0, since=1)
    here = [
        Worker(settings(tmp_path / name), communicator, record)
        for name, communicator in zip("ab", build_in_process(2, 1), strict=True)
    ]

    def enter(worker: Worker) -> str:
        try:
            worker.enter()
        except CheckpointsUnreadable as error:
            return str(error)
        return ""

    of_first, of_second = run_ranks(here, enter)
    assert not of_first and "All nodes must see one --checkpoint-dir" in of_second


def test_the_file_of_a_run_may_be_seen_late(tmp_path: Path) -> None:
    pauses = []

    def pause(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 3:
            (tmp_path / "run-0007.json").touch()

    restore.require_one_directory(LocalStorage(tmp_path), Choice(7, None), pause)
    assert len(pauses) == 3


@pytest.mark.parametrize("storage_is_there", [True, False])
def test_a_member_without_the_directory_or_of_a_run_without_a_file_goes_on(
    tmp_path: Path, storage_is_there: bool
) -> None:
    root = tmp_path if storage_is_there else tmp_path / "away"
    restore.require_one_directory(LocalStorage(root), Choice(7, None, is_noted=not storage_is_there))


def test_parts_that_stay_missing_are_said_and_no_checkpoint_counts_as_saved(tmp_path: Path) -> None:
    now_s = 0.0
    first, second = build_in_process(2)
    ranks = [
        Rank(tmp_path / "a", first, every="1", clock=lambda: now_s),
        Rank(tmp_path / "b", second, every="1"),
    ]
    lead = ranks[0].checkpointer
    together(ranks, 3, begin=True)
    assert lead.writer.saved == Saved(3, "") and not ranks[0].said, "a mount may list the parts later"
    now_s += LISTING_LAG_S
    together(ranks, 2)
    saved = lead.writer.saved
    assert saved.step == 0 and "step 1 is not whole" in saved.trouble
    assert "part 1 of 2 is missing" in saved.trouble and saved.trouble in ranks[0].said[0]
    assert lead.is_last_written(ranks[0].moment, DEADLINE_S) == saved.trouble

    ranks[1].checkpointer.writer._storage = LocalStorage(tmp_path / "a")
    together(ranks, 2)
    assert lead.writer.saved == Saved(7, "") and len(ranks[0].said) == 2
    assert lead.is_last_written(ranks[0].moment, DEADLINE_S) == ""
