"""etcd loses all its data while the job trains: members put the job's keys again, no step is missed, nodes can join."""

from __future__ import annotations

import shutil

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.wait import eventually


def wipe(cluster: EtcdCluster) -> None:
    """Killed, its disk lost, started again at the same place."""
    cluster.kill()
    for member in cluster.members:
        shutil.rmtree(member.data)
    cluster.restart()


def commits_known(cluster: EtcdCluster, job: Job) -> int:
    """How many members have told etcd of a commit."""
    found = cluster.standing(JobKeys(job.job_id).members).values()
    return sum(pb.Member.FromString(standing.value).committed_generation > 0 for standing in found)


def elections(nodes: list[Node]) -> int:
    return sum(node.log.count("this node leads") for node in nodes)


def test_the_key_space_is_lost_while_the_job_trains(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3")
    nodes = [one.start(lab.hosts[0]), one.start(lab.hosts[1], slots=2)]
    one.await_world(3)
    before = one.step
    key_pair = JobKeys(one.job_id).identity
    [made] = cluster.history(key_pair)
    wipe(cluster)
    for node in nodes:
        node.await_line("etcd answers again")
    # once more, or twice: the winner may still hear that its old key went
    eventually(lambda: elections(nodes) >= 2, 20.0, lambda: "a new leader", 0.05)
    after = one.await_world(3, after_step=one.step)
    put_again = cluster.history(key_pair)
    assert put_again and {change.value for change in put_again} == {made.value}, (
        "who joins is known to who is there"
    )
    nodes.append(one.start(lab.hosts[2]))
    four = one.await_world(4, after_step=after)
    assert {x.world_size for x in one.ledger.lines if before <= x.step < four} == {3}
    one.finish()
    one.check(finished=4)
    assert any(node.says("putting them again") for node in nodes)
    for node in nodes:
        assert not node.says("did not happen"), "no step is missed"
        assert node.says("succeeded")


def test_a_worker_dies_after_the_key_space_was_lost(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:2")
    nodes = [one.start(lab.hosts[0]), one.start(lab.hosts[1])]
    one.await_world(2)
    wipe(cluster)
    for node in nodes:
        node.await_line("etcd answers again")
    nodes[1].workers[0].kill()
    one.await_world(1)
    one.await_world(2, after_step=one.last_world(1))
    one.finish()
    one.check(finished=2)


def test_the_job_is_started_anew_in_the_empty_store(job: MakeJob, make_lab: MakeLab) -> None:
    """Members' memory beats a job that has trained nothing: the newcomer gives way, and joins."""
    lab = make_lab(3)
    cluster = lab.etcd(lab.hosts[2])
    one = job(endpoints=cluster.endpoints, nodes="2:3")
    nodes = [one.start(lab.hosts[0]), one.start(lab.hosts[1])]
    one.await_world(2)
    # Agents that know of no commit would give way to the job that is begun anew.
    eventually(lambda: commits_known(cluster, one) == 2, 20.0, lambda: "commits are known", 0.05)
    lab.hosts[2].cut()
    wipe(cluster)
    nodes.append(one.start(lab.hosts[2]))
    nodes[2].await_line("this node leads")
    before = one.step
    lab.hosts[2].heal()
    nodes[2].await_line("joining again")
    three = one.await_world(3, after_step=before)
    assert {x.world_size for x in one.ledger.lines if x.step < three} == {2}
    one.finish()
    one.check(finished=3)
    for node in nodes[:2]:
        assert not node.says("did not happen"), "no step is missed"
