"""An etcd of three members: one is killed or cut off, the leading one is killed, all are gone and come back."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.etcd import EtcdCluster, EtcdMember
from tests.lab.network import Lab

# No step may be missed; a step of 0.25 s on two shared cores may itself take a few times as long.
STEP_BOUND_S = 1.0
STEP_S = 0.25
THROUGH_A_LEASE = 20  # steps: longer than a lease


def three_members(job: MakeJob, make_lab: MakeLab) -> tuple[Lab, EtcdCluster, Job, list[Node]]:
    """etcd on a host of its own, two nodes that train on two others, and one host to spare."""
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0], members=3)
    one = job(endpoints=cluster.endpoints, nodes="1:3", samples=1440, script=["--step-s", str(STEP_S)])
    nodes = [one.start(host) for host in lab.hosts[1:3]]
    one.await_world(2, after_step=5)
    return lab, cluster, one, nodes


@pytest.mark.parametrize("which", ["leader", pytest.param("follower", marks=pytest.mark.long)])
def test_a_member_is_killed(job: MakeJob, make_lab: MakeLab, which: str) -> None:
    lab, cluster, one, nodes = three_members(job, make_lab)
    victim: EtcdMember = cluster.leader if which == "leader" else cluster.followers[0]
    killed_at = one.step
    victim.kill()
    one.start(lab.hosts[3])
    one.await_step(killed_at + THROUGH_A_LEASE)
    end = one.await_world(3, after_step=killed_at)
    gap_s = one.largest_gap_s(killed_at, end)
    one.measured(f"largest gap between steps, etcd's {which} killed", gap_s, STEP_BOUND_S)
    assert cluster.leader is not victim
    victim.restart()
    one.finish()
    one.check(finished=3)
    for node in nodes:
        assert not node.says("did not happen"), "no step is missed"


def test_all_members_are_gone_and_come_back(job: MakeJob, make_lab: MakeLab) -> None:
    lab, cluster, one, nodes = three_members(job, make_lab)
    killed_at = one.step
    cluster.kill()
    for node in nodes:
        node.await_line("etcd does not answer")
    one.start(lab.hosts[3])  # it waits for etcd
    end = one.await_step(killed_at + THROUGH_A_LEASE)
    one.measured("largest gap between steps, etcd gone", one.largest_gap_s(killed_at, end), STEP_BOUND_S)
    cluster.restart()
    for node in nodes:
        node.await_line("etcd answers again")
    three = one.await_world(3, after_step=end)
    one.scale(lab.hosts[0], "1:1")
    one.await_world(1, after_step=three)
    one.finish()
    one.check(finished=1)
    for node in nodes:
        assert not node.says("did not happen"), "no step is missed"


def test_an_empty_member_takes_the_place_of_one_that_lost_its_disk(job: MakeJob, make_lab: MakeLab) -> None:
    lab, cluster, one, nodes = three_members(job, make_lab)
    one.start(lab.hosts[3])
    wiped_at = one.step
    cluster.members[0].wipe()  # the first endpoint of all agents
    end = one.await_world(3, after_step=one.step)
    one.measured("largest gap between steps, member wiped", one.largest_gap_s(wiped_at, end), STEP_BOUND_S)
    one.finish()
    one.check(finished=3)
    for node in nodes:
        assert not node.says("did not happen"), "no step is missed"


@pytest.mark.long
def test_a_member_that_is_cut_off_from_the_others_is_left(job: MakeJob, make_lab: MakeLab) -> None:
    """It is the first endpoint of all agents, and still answers them."""
    lab = make_lab(5)
    cluster = lab.etcd(*lab.hosts[:3])
    one = job(endpoints=cluster.endpoints, nodes="1:2", samples=1440, script=["--step-s", str(STEP_S)])
    nodes = [one.start(host) for host in lab.hosts[3:]]
    one.await_world(2, after_step=5)
    for other in lab.hosts[1:3]:
        lab.hosts[0].cut_to(other)
    nodes[1].workers[0].kill()
    alone = one.await_world(1, after_step=one.step)
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)
