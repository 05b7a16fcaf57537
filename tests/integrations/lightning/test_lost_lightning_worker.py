"""A worker of a Lightning trainer is killed: the others continue in their processes, and its successor comes in."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_worker_is_lost_and_another_joins_while_gradients_accumulate(lightning_job: Any) -> None:
    """24 batches an epoch in groups of 5, the last of 4: the loss and the join come within groups. A callback averages
    the weights, and gives the model its averages at the end."""
    words = ("--accumulate", "5", "--clip", "0.1", "--precision", "bf16-mixed", "--average")
    one = lightning_job(*words, samples=576)
    node = one.start(slots=2)
    one.await_step(7)
    survivor, victim = node.workers
    victim.kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    ends = one.check_trainers(finished=2, accumulated=5)
    assert survivor.worker_id in {end["worker"] for end in ends}
    assert not node.says("fresh interpreter"), "a worker's start is a fork"


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["bytegrad", "low_precision_decentralized", "async"])
def test_the_main_worker_is_lost_with_other_algorithms(lightning_job: Any, algorithm: str) -> None:
    one = lightning_job("--algorithm", algorithm)
    node = one.start(slots=2)
    one.await_step(5)
    node.workers[0].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check_trainers(finished=2, has_equal_states=algorithm == "bytegrad")


@pytest.mark.long
def test_a_module_that_steps_two_optimizers_itself(lightning_job: Any) -> None:
    one = lightning_job("--manual")
    node = one.start(slots=2)
    one.await_step(5)
    node.workers[1].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    ends = one.check_trainers(finished=2, has_scheduler=False)
    assert {end["global_step"] for end in ends} == {2 * one.ledger.steps}


@pytest.mark.long
def test_a_worker_joins_behind_the_epoch_that_unfroze_a_layer(lightning_job: Any) -> None:
    """A BaseFinetuning of Lightning's, which acts in its own epoch only and adds a group to the optimizer."""
    one = lightning_job("--thaw", epochs=3)
    node = one.start(slots=2)
    one.await_step(2 * (one.samples // 24) + 1)
    node.workers[1].kill()
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check_trainers(finished=2)
