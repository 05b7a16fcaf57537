"""Nothing outlives its agent, also with DataLoader processes alive; and these take part in no fault."""

from __future__ import annotations

from tests.faults.conftest import MakeJob
from tests.lab.wait import eventually


def test_a_killed_agent_leaves_no_process(job: MakeJob) -> None:
    one = job(script=["--loader-workers", "2"])
    node = one.start(slots=2)
    one.await_step(5)
    family = node.family
    assert len(family) >= 2 + 2 * 2, "workers and their loader processes"
    node.kill_agent()
    one.check_nothing_left()
    eventually(lambda: not set(family) & set(one.alive(family)), 5.0, "the guardian and etcd end too")


def test_a_worker_with_loader_processes_is_killed(job: MakeJob) -> None:
    one = job(script=["--loader-workers", "1"])
    node = one.start(slots=2)
    one.await_step(10)
    victim = node.workers[1]
    children = node.children_of(victim)
    assert children, "its loader processes"
    before = one.last_world(2)
    victim.kill()
    alone = one.await_world(1, after_step=before)
    assert one.alive(children) == []
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)
