"""Workers come and go while work is balanced by learned costs: every sample once, and all learn the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from bagua_core.data.balancing.cost_learning import EVERY_STEPS
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node

SCRIPT = Path(__file__).with_name("train_balanced.py")


def balanced(job: MakeJob, *more: str, samples: int = 2400, epochs: int = 4) -> Job:
    words = [str(SCRIPT), "--samples", str(samples), "--epochs", str(epochs), *more]
    return job(program=words, samples=samples, epochs=epochs)


def start(one: Job, slots: int, failpoints: str = "") -> Node:
    return one.start(slots=slots, failpoints=failpoints, environment={"TRAIN_OUT": str(one.out)})


def check(one: Job, finished: int) -> None:
    one.finish()
    one.check(finished=finished)
    ends = one.ends()
    assert ends[0]["curves"], "costs were learned"
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
def test_a_worker_is_killed_and_its_successor_learns_what_the_others_know(
    job: MakeJob, more: tuple[str, ...]
) -> None:
    one = balanced(job, *more)
    node = start(one, 2)
    one.await_step(2 * EVERY_STEPS + 3)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    alone = one.await_world(1)
    both = one.await_world(2, after_step=alone)
    one.await_step(both + EVERY_STEPS + 3)
    check(one, finished=2)


@pytest.mark.parametrize(
    ("point", "step"),
    [
        # in the very step that agrees on costs: before its reduction, after it, and when it is final
        ("reduction.before", 2 * EVERY_STEPS - 1),
        pytest.param("reduction.done", 2 * EVERY_STEPS - 1, marks=pytest.mark.long),
        pytest.param("commit.after", 2 * EVERY_STEPS, marks=pytest.mark.long),
        pytest.param("step.begin", 2 * EVERY_STEPS - 1, marks=pytest.mark.long),
    ],
)
def test_a_worker_is_killed_where_costs_are_agreed_on(job: MakeJob, point: str, step: int) -> None:
    one = balanced(job)
    node = start(one, 3, f"{point}=kill@{step}#1")
    node.await_line(f"bagua failpoint {point} fired: kill at step {step}")
    alone = one.await_world(2, after_step=step)
    one.await_step(one.await_world(3, after_step=alone) + EVERY_STEPS + 3)
    check(one, finished=3)
