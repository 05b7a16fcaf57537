"""A worker of an accelerate loop is killed: the others continue in their processes, and its successor comes in. A job
that was stopped goes on where it was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.job import Job

SCRIPT = Path(__file__).with_name("train_accelerate.py")
SAMPLES, EPOCHS = 576, 2  # 24 batches an epoch


@pytest.fixture
def accelerate_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """accelerate_job(*words for the script, options=): what still runs after the test is killed."""
    made: list[Job] = []

    def make(*script: str, options: Sequence[str] = ()) -> Job:
        program = [
            str(SCRIPT),
            "--out",
            str(tmp_path / "out"),
            "--samples",
            str(SAMPLES),
            "--epochs",
            str(EPOCHS),
        ]
        program += script
        made.append(
            Job(
                tmp_path,
                samples=SAMPLES,
                epochs=EPOCHS,
                options=options,
                program=program,
                imports="accelerate",
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.end()


def run_with_a_loss(one: Job, slot: int) -> str:
    """Kill a worker and let its successor join; the id of the worker that stays."""
    node = one.start(slots=2)
    one.await_step(7)
    workers = node.workers
    workers[slot].kill()
    node.await_line(f"worker in slot {slot} ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    return workers[1 - slot].worker_id


def check(one: Job, survivor: str, *, accumulated: int, has_equal_states: bool = True) -> None:
    ends = one.ends()
    assert len(ends) == 2 and survivor in {end["worker"] for end in ends}
    check_ends(one, accumulated=accumulated, has_equal_states=has_equal_states)


def check_ends(one: Job, *, accumulated: int, has_equal_states: bool = True) -> None:
    """Every sample once, and the workers that ended agree with each other and with the ledger."""
    found, ends = one.ledger, one.ends()
    assert found.check(SAMPLES, EPOCHS) == [], "every sample once in an epoch"
    for what in ("parameters", "scheduler", *(["optimizer"] if has_equal_states else [])):
        assert len({end[what] for end in ends}) == 1, f"{what} differ: {ends}"
    updates = EPOCHS * -(-found.steps // EPOCHS // accumulated)
    for end in ends:
        assert end["steps_of_scheduler"] == end["steps_of_optimizer"] == updates, end
        assert end["batches_of_batch_norm"] == found.steps, end
        assert end["seen"][-1] == 50, "an evaluation has every sample once"
    one.check_nothing_left()


def test_a_worker_is_lost_and_another_joins_while_gradients_accumulate(
    accelerate_job: Callable[..., Job],
) -> None:
    """Groups of 5 batches, the last of 4: the loss and the join come within groups."""
    one = accelerate_job("--accumulate", "5")
    check(one, run_with_a_loss(one, slot=1), accumulated=5)


def test_a_worker_is_lost_between_the_collectives_of_a_gather(accelerate_job: Callable[..., Job]) -> None:
    one = accelerate_job("--dies-in-gather")
    node = one.start(slots=2)
    one.await_step(7)
    survivor = node.workers[0].worker_id
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    assert (one.out / "has-died").exists() and node.says("worker in slot 1 ended: killed by SIGKILL")
    check(one, survivor, accumulated=1)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["bytegrad", "low_precision_decentralized", "async"])
def test_the_main_worker_is_lost_with_other_algorithms(
    accelerate_job: Callable[..., Job], algorithm: str
) -> None:
    one = accelerate_job("--algorithm", algorithm)
    check(one, run_with_a_loss(one, slot=0), accumulated=1, has_equal_states=algorithm == "bytegrad")


@pytest.mark.long
def test_a_stopped_job_goes_on_within_a_group_with_another_number_of_workers(
    accelerate_job: Callable[..., Job], tmp_path: Path
) -> None:
    one = accelerate_job("--accumulate", "5", options=["--checkpoint-dir", str(tmp_path / "saved")])
    node = one.start(slots=2)
    one.await_step(7)
    node.send(signal.SIGTERM)
    assert node.process.wait(40) == 143
    assert 7 <= one.step < SAMPLES // 24, "it was stopped in its first epoch"
    one.start(slots=1)
    one.finish(codes=[143, 0])
    assert one.ledger.lines[-1].world_size == 1 and len(one.ends()) == 1
    check_ends(one, accumulated=5)
