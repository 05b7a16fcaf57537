"""A worker is killed: its job goes on without it, and its successor comes in."""

from __future__ import annotations

from tests.faults.conftest import MakeJob


def test_one_of_two_workers_on_one_host_is_killed(job: MakeJob) -> None:
    one = job()
    node = one.start(slots=2)
    one.await_step(20)
    victim = node.workers[1]
    victim.kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    alone = one.await_world(1)
    one.await_world(2, after_step=alone)
    assert node.workers[1].worker_id != victim.worker_id
    one.finish()
    one.check(finished=2)
    loss = ("is in force from step", "1 worker on 1 node", "lost global rank 1 on", "without steps")
    assert node.says(*loss), "one line has what happened, why, and what it cost"


def test_the_worker_of_rank_0_is_killed(job: MakeJob) -> None:
    one = job()
    node = one.start(slots=2)
    one.await_step(20)
    node.workers[0].kill()
    node.await_line("worker in slot 0 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check(finished=2)
