"""Workers come and go while work is balanced: every sample once."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.faults.conftest import MakeJob
from tests.faults.job import Job

SCRIPT = Path(__file__).with_name("train_balanced.py")


def balanced(job: MakeJob, *more: str, samples: int = 1200, epochs: int = 2) -> Job:
    words = [str(SCRIPT), "--samples", str(samples), "--epochs", str(epochs), *more]
    return job(program=words, samples=samples, epochs=epochs)


def check(one: Job, finished: int) -> None:
    one.finish()
    one.check(finished=finished)
    sizes = defaultdict(set)
    for line in one.ledger.lines:
        if line.world_size > 1 and line.samples:
            sizes[line.generation, line.step].add(len(line.samples))
    assert any(max(of_step) - min(of_step) > 1 for of_step in sizes.values()), (
        "shares are not of equal number"
    )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--loader-workers", "2"), id="loader-workers"),
        pytest.param(("--budget", "120", "--max-local", "5"), id="budget-and-micro-batches"),
    ],
)
def test_a_worker_is_killed_and_a_successor_comes(job: MakeJob, more: tuple[str, ...]) -> None:
    one = balanced(job, *more)
    node = one.start(slots=2, environment={"TRAIN_OUT": str(one.out)})
    one.await_step(10)
    both = one.replace_killed_worker(node)
    one.await_step(both + 10)
    check(one, finished=2)
