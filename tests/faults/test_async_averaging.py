"""Asynchronous model averaging under joins and losses: no worker waits for a round, and none is half taken."""

from __future__ import annotations

from tests.faults.conftest import MakeJob

ARGUMENTS = ["--algorithm", "async", "--algorithm-arguments", '{"sync_interval_ms": 50}']


def test_a_worker_is_lost_and_replaced(job: MakeJob) -> None:
    one = job(script=ARGUMENTS)
    node = one.start(slots=2)
    one.await_step(20)
    node.workers[1].kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1))
    one.finish()
    one.check(finished=2)
