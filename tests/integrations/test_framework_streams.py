"""Frameworks train on a stream: each item of an epoch once, as a plain loop in one process trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_core as bagua
from tests.faults.job import Job
from tests.integrations import stream_training as plain
from tests.integrations import train_stream as script

FRAMEWORKS = list(script.TRAININGS)


def check_model(found: dict[str, torch.Tensor], updates: int, framework: str) -> None:
    # a batch of transformers' Trainer is a whole optimizer step
    accumulated = 1 if framework == "transformers" else plain.ACCUMULATED
    expected, steps = plain.train_plainly(accumulated)
    assert updates == steps
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


@pytest.fixture
def alone() -> Iterator[None]:
    bagua.shutdown()
    yield
    bagua.shutdown()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_one_worker_trains_as_a_plain_loop(alone: None, tmp_path: Path, framework: str) -> None:
    stage = script.Stage(tmp_path, dies=False)
    model, updates = script.TRAININGS[framework](stage, plain.Items(), tmp_path, plain.EPOCHS)
    check_model(model.state_dict(), updates, framework)


@pytest.fixture
def stream_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(framework: str, kind: str, *words: str) -> Job:
        program = [str(Path(script.__file__)), "--out", str(tmp_path / "out")]
        program += ["--with", framework, "--kind", kind, *words]
        made.append(Job(tmp_path, samples=plain.SAMPLES, epochs=plain.EPOCHS, program=program))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.long
@pytest.mark.parametrize("kind", list(plain.KINDS))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_worker_is_lost_and_its_successor_comes_with_the_last_batch_of_an_epoch(
    stream_job: Callable[..., Job], framework: str, kind: str
) -> None:
    """The successor can't know that this batch is the last one, behind which a group of batches ends early, until it
    has copied the state."""
    one = stream_job(framework, kind, "--dies")
    node = one.start(slots=2)
    one.finish(deadline_s=90)
    assert (one.out / "has-died").exists() and node.says("worker in slot 1 ended: killed by SIGKILL")
    assert one.ledger.check(plain.SAMPLES, plain.EPOCHS) == [], "every item once in an epoch"
    ends: list[dict[str, Any]] = one.ends()
    assert sorted(end["began_at"] for end in ends) == [[0, 0], [0, plain.BATCHES - 1]]
    for end in ends:
        check_model(torch.load(one.out / "ends" / f"{end['worker']}.pt"), end["updates"], framework)
    one.check_nothing_left()
