"""Nodes come and go as they were asked to: join, scale, SIGTERM, too few of them."""

from __future__ import annotations

import signal

from tests.faults.conftest import MakeJob, MakeLab
from tests.lab.worker_stacks import stacks


def test_a_node_joins(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    first = one.start(lab.hosts[0])
    alone = one.await_step(10)
    second = one.start(lab.hosts[1], slots=2)
    one.await_world(3, after_step=alone)
    second.await_line("is in force from step")
    one.finish()
    one.check(finished=3)
    assert not first.says("did not happen"), "a join costs no step"
    assert not second.says("did not happen")


def test_scaled_from_one_node_to_four_to_two(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:1")
    nodes = [one.start(lab.hosts[0])]
    nodes[0].await_line("is in force")
    nodes += [one.start(host) for host in lab.hosts[1:]]
    for spare in nodes[1:]:
        spare.await_line("generation 2")
    one.scale(lab.hosts[1], "1:4")
    four = one.await_world(4)
    one.scale(lab.hosts[2], "1:2")
    two = one.await_world(2, after_step=four)
    assert {line.world_size for line in one.ledger.lines if line.step > two} <= {2}
    one.finish()  # with 0 on the spares too
    one.check(finished=2)
    for node in nodes:
        assert not node.says("did not happen")


def test_a_node_is_asked_to_leave(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    staying, leaving = one.start(lab.hosts[0]), one.start(lab.hosts[1])
    both = one.await_world(2)
    staying.await_line("loss 2, mean of 2 workers  (generation")
    leaving.send(signal.SIGTERM)
    assert leaving.process.wait(10) == 0
    assert leaving.says("left; the job goes on without this node")
    one.await_world(1, after_step=both)
    staying.await_line("loss 1  (generation")
    one.finish()
    one.check(finished=1)
    assert not staying.says("did not happen"), "leaving costs no step"


def test_the_leading_node_with_the_oldest_state_is_asked_to_leave(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    leaving = one.start(lab.hosts[1])
    leaving.await_line("is in force")
    one.start(lab.hosts[2])
    both = one.await_world(2)
    leaving.send(signal.SIGTERM)
    assert leaving.process.wait(10) == 0
    one.await_world(1, after_step=both)
    one.finish()
    one.check(finished=1)


def test_below_the_minimum_the_job_waits_for_a_node_and_goes_on(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="2:3")
    first, second = one.start(lab.hosts[1]), one.start(lab.hosts[2])
    one.await_step(10)
    held = first.workers
    second.kill_agent()
    first.await_line("waiting: 1 of 2 nodes")
    stopped = one.step
    second = one.start(lab.hosts[2])
    again = one.await_world(2, after_step=stopped + 1)
    second.kill_agent()
    first.await_line("waiting: 1 of 2 nodes", times=2)  # each wait has its line
    one.start(lab.hosts[2])
    one.await_world(2, after_step=again + 1)
    assert first.workers == held, "holders of the state keep their processes"
    assert {line.world_size for line in one.ledger.lines} == {2}
    one.finish([0, -9, -9, 0])
    one.check(finished=2)


def test_interrupted_on_the_only_node(job: MakeJob) -> None:
    one = job()
    node = one.start(slots=2)
    one.await_step(10)
    node.send(signal.SIGINT)
    assert node.process.wait(10) == 128 + signal.SIGINT
    assert node.says("leaving at the next step boundary")
    assert not node.says("did not happen") and not node.says("Traceback")
    one.check_nothing_left()


def test_interrupted_twice_ends_at_once(job: MakeJob) -> None:
    one = job(script=["--hang-at", "0"])
    node = one.start(slots=2)
    one.await_hanging_worker()
    assert "hang_here" in stacks(w.pid for w in node.workers), "a test of a job that hangs shows where"
    node.send(signal.SIGINT)
    node.await_line("leaving at the next step boundary")
    node.send(signal.SIGINT)
    assert node.process.wait(5) == 128 + signal.SIGINT
    one.check_nothing_left()
