"""etcd is killed and started again: training does not notice, and changes of membership wait."""

from __future__ import annotations

import signal

from bagua_agent.node.node_ending import UNKNOWN
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import STEPS, Job
from tests.lab.etcd import EtcdCluster


def test_etcd_is_killed_and_started_again(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3", samples=1440, script=["--step-s", "0.25"])
    nodes = [one.start(lab.hosts[0]), one.start(lab.hosts[1])]
    one.await_world(2)
    cluster.kill()
    for node in nodes:
        node.await_line("etcd does not answer")
    # longer than a lease: a job that depended on its keys would notice
    during = one.step
    one.await_step(during + 20)
    cluster.restart()
    for node in nodes:
        node.await_line("etcd answers again")
    after = one.await_world(2, after_step=one.step)
    nodes.append(one.start(lab.hosts[2]))
    three = one.await_world(3, after_step=after)
    assert {x.world_size for x in one.ledger.lines if during <= x.step < three} == {2}
    one.finish()
    one.check(finished=3)
    for node in nodes:
        assert not node.says("did not happen"), "no step is missed"


def two_without_etcd(job: MakeJob, make_lab: MakeLab) -> tuple[Job, EtcdCluster]:
    """Two nodes that train, and the etcd, just killed."""
    lab = make_lab(2)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:2")
    for host in lab.hosts:
        one.start(host)
    one.await_world(2)
    cluster.kill()
    return one, cluster


def test_the_job_ends_while_etcd_is_away(job: MakeJob, make_lab: MakeLab) -> None:
    one, cluster = two_without_etcd(job, make_lab)
    for node in one.nodes:
        node.await_line("etcd does not answer")
    one.hurry()
    one.await_step(STEPS - 10)
    cluster.restart()
    one.finish()
    one.check(finished=2)
    for node in one.nodes:
        assert node.says("succeeded")


def test_no_node_that_leaves_meanwhile_claims_that_the_job_goes_on(job: MakeJob, make_lab: MakeLab) -> None:
    """As when a batch system signals every process at once, etcd too: each node would rely on the others."""
    one, _ = two_without_etcd(job, make_lab)
    for node in one.nodes:
        for process in (node, *node.workers):
            process.send(signal.SIGTERM)
    one.finish([128 + signal.SIGTERM] * 2)
    for node in one.nodes:
        assert node.says(UNKNOWN) and not node.says("goes on without this node")
