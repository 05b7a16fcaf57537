"""save_checkpoint on a worker that has no peers and is not rank 0: it returns, and saves nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from bagua_core.torch_api import checkpoint
from tests.core.collectives.calls import acting
from tests.core.elastic.worlds_of_workers import Job, Worker

MOST_ATTEMPTS = 3


def save(worker: Worker, into: Path, patch: pytest.MonkeyPatch) -> int:
    """Saves as the script of `worker`, and returns the number of attempts."""
    ranks: list[int] = []

    def rank() -> int:
        assert len(ranks) < MOST_ATTEMPTS, "it repeats what nothing can change"
        ranks.append(worker.place_of_script()[0])
        return ranks[-1]

    patch.setattr(checkpoint, "get_rank", rank)
    patch.setattr(checkpoint, "this_script", lambda: SimpleNamespace(engine=worker))
    acting(lambda _: checkpoint.save_checkpoint(5, str(into), nn.Linear(1, 1)))(worker)
    return len(ranks)


def test_before_its_first_step_a_joiner_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    joiner = Job(3).workers[2]
    joiner.newcomers = frozenset({2})
    assert save(joiner, tmp_path, monkeypatch) == 1
    assert not list(tmp_path.iterdir())


def test_a_worker_that_the_job_goes_on_without_meanwhile_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2)
    cut = job.workers[1]
    job.lose("w1")
    cut.break_generation(RuntimeError("its network is cut"))
    assert save(cut, tmp_path, monkeypatch) == 1
    assert cut.place_left_out == (1, 2)
    assert not list(tmp_path.iterdir())


def test_a_worker_that_the_job_went_on_without_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(2)
    cut = job.workers[1]
    job.lose("w1")
    cut.follow(outside=True)
    assert save(cut, tmp_path, monkeypatch) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("knows", [False, True], ids=["network cut", "left out before"])
def test_a_rank_0_that_the_job_goes_on_without_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    """If it was left out before, it has rank 1 and saves nothing. Else the next rank 0 saves the same states too."""
    job = Job(2)
    cut = job.workers[0]
    job.lose("w0")
    if knows:
        cut.follow(outside=True)
    else:
        cut.break_generation(RuntimeError("its network is cut"))
    assert save(cut, tmp_path, monkeypatch) == 1
    assert (tmp_path / checkpoint.TRACKER).exists() != knows
