"""A worker of a Lightning trainer is killed: the others continue in their processes, and its successor comes in."""

from __future__ import annotations

from typing import Any


def test_one_of_two_workers_is_killed_and_its_successor_joins(lightning_job: Any) -> None:
    one = lightning_job()
    node = one.start(slots=2)
    one.await_step(5)
    survivor, victim = node.workers
    victim.kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check_trainers(finished=2)
    assert survivor.worker_id in {end["worker"] for end in one.ends()}
    assert not node.says("fresh interpreter"), "a worker's start is a fork"
