"""A job of allowed sizes: a node that makes no size waits and says so, and takes a lost node's place at once."""

from __future__ import annotations

import signal

from tests.faults.conftest import MakeJob, MakeLab


def test_two_or_four_nodes_and_never_three(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(5)
    etcd = lab.etcd(lab.hosts[0])
    one = job(endpoints=etcd.endpoints, nodes="2:4", options=("--sizes", "2,4"))
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    second = one.start(lab.hosts[2])
    one.await_world(2)
    third = one.start(lab.hosts[3])
    why = "waiting for 1 more node to train on 4 (allowed sizes: 2, 4)"
    for node in (first, third):
        node.await_line(why)
    fourth = one.start(lab.hosts[4])
    four = one.await_world(4)
    fourth.kill_agent()
    # one of the three that are left is spare
    two = one.await_world(2, after_step=four)
    second.kill_agent()
    one.await_step(two + 20)
    killed = -signal.SIGKILL
    one.finish([0, killed, 0, killed])
    one.check(finished=2)
    assert {line.world_size for line in one.ledger.lines} == {2, 4}
    *_, last = records = one.generations(etcd)
    assert {g.node_count for g in records} == {2, 4}
    assert {m.node_name for m in last.members} == {lab.hosts[1].name, lab.hosts[3].name}, (
        "the spare took its place"
    )


def test_the_cooldown_delays_a_join_and_neither_a_leave_nor_a_loss(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    etcd = lab.etcd(lab.hosts[0])
    # longer than every deadline of this test
    options = ("--start-size", "2", "--cooldown", "600")
    one = job(endpoints=etcd.endpoints, nodes="1:3", options=options)
    first = one.start(lab.hosts[1])
    first.await_line("waiting: 1 of 2 nodes")
    second = one.start(lab.hosts[2])
    both = one.await_world(2)
    third = one.start(lab.hosts[3])
    for node in (first, third):
        node.await_line("waiting for the cooldown of 600 s", "s left")
    joined = len(one.generations(etcd))
    second.send(signal.SIGTERM)
    assert second.process.wait(10) == 0
    third.await_line("is in force from step")
    one.await_step(one.step + 10)
    assert {x.world_size for x in one.ledger.lines if x.step > both} == {2}, "it takes the leaver's place"
    third.kill_agent()
    one.await_world(1, after_step=one.step)
    one.finish([0, 0, -signal.SIGKILL])
    one.check(finished=1)
    assert [g.node_count for g in one.generations(etcd)[joined:]] == [2, 1]
