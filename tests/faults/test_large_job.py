"""A job that takes itself for a large one, with limits lowered to three hosts: agents see the leader's keys alone,
records stand in parts. What a small job withstands it withstands too.
"""

from __future__ import annotations

import signal

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.limits import PICTURE_VARIABLE, RECORD_VARIABLE
from bagua_agent.large_jobs.record_parts import Head, head_of
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job
from tests.faults.test_replicas import END_S, check, sharded
from tests.faults.test_store_wiped import wipe
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Lab
from tests.lab.wait import eventually

LARGE = {PICTURE_VARIABLE: "0", RECORD_VARIABLE: "1"}


def heads(one: Job, cluster: EtcdCluster) -> list[Head]:
    changes = cluster.history(JobKeys(one.job_id).generation)
    found = [head_of(change.value) for change in changes if change.value is not None]
    return [head for head in found if head is not None]


def large(job: MakeJob, lab: Lab, cluster: EtcdCluster) -> Job:
    """Three nodes in one generation of a job, the first of them leading; its record is in parts."""
    one = job(endpoints=cluster.endpoints, nodes="1:3")
    one.start(lab.hosts[1], environment=LARGE).await_line("this node leads")
    for host in (lab.hosts[2], lab.hosts[3]):
        one.start(host, environment=LARGE)
    one.await_world(3, after_step=19)
    assert heads(one, cluster)[-1].node_count == 3
    return one


def test_its_leader_is_killed_and_comes_back_as_a_newcomer(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = large(job, lab, cluster)
    one.nodes[0].kill_agent()
    eventually(
        lambda: any(node.says("this node leads") for node in one.nodes[1:]), 20.0, "another leads", 0.05
    )
    two = one.await_world(2, after_step=one.last_world(3))
    one.start(lab.hosts[1], environment=LARGE)
    one.await_world(3, after_step=two)
    one.finish([-9, 0, 0, 0])
    one.check(finished=3)
    numbers = [head.number for head in heads(one, cluster)]
    assert numbers == sorted(set(numbers)) and len(numbers) >= 3


def test_a_follower_is_lost_and_the_job_is_scaled(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = large(job, lab, cluster)
    one.nodes[2].kill_agent()
    two = one.await_world(2, after_step=one.last_world(3))
    one.nodes[1].workers[0].kill()
    one.await_world(1, after_step=two)
    again = one.await_world(2, after_step=one.last_world(1))
    one.scale(lab.hosts[0], "1:1")
    alone = one.await_world(1, after_step=again)
    one.scale(lab.hosts[0], "1:2")
    one.await_world(2, after_step=alone)
    one.finish([0, 0, -9])
    one.check(finished=2)


def test_a_node_leaves_and_the_leader_after_it(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    one = large(job, lab, lab.etcd(lab.hosts[0]))
    one.nodes[1].send(signal.SIGTERM)
    two = one.await_world(2, after_step=one.last_world(3))
    one.nodes[0].send(signal.SIGTERM)
    one.await_world(1, after_step=two)
    one.nodes[2].await_line("this node leads")
    one.finish()
    one.check(finished=1)


def test_its_keys_are_lost_with_etcds_disk(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = large(job, lab, cluster)
    wipe(cluster)
    for node in one.nodes:
        node.await_line("etcd answers again")
    one.nodes[2].workers[0].kill()
    one.await_world(2)
    one.await_world(3, after_step=one.last_world(2))
    one.finish()
    one.check(finished=3)
    assert any(node.says("putting them again") for node in one.nodes)
    newest = heads(one, cluster)[-1]
    assert newest.node_count == 3


def test_replicas_across_its_nodes_are_lost_and_come_back(job: MakeJob, make_lab: MakeLab) -> None:
    """Two replicas of two hosts each. The agents follow the leader's keys and the records of replicas alone."""
    lab = make_lab(6)
    cluster = lab.etcd(lab.hosts[0])
    one = sharded(job, "2:4", endpoints=cluster.endpoints)
    nodes = [one.start(host, environment=LARGE) for host in lab.hosts[1:5]]
    before = one.await_world(2, after_step=9)
    assert heads(one, cluster)[-1].node_count == 4
    nodes[3].kill_agent()
    alone = one.await_world(1, after_step=before)
    one.start(lab.hosts[5], environment=LARGE)
    again = one.await_world(2, after_step=alone)
    one.await_step(again + 2)
    one.finish([0, 0, 0, -9, 0], deadline_s=END_S)
    check(one, finished=4)
