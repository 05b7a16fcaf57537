"""A node is lost: its agent is killed, or its link is cut and comes back."""

from __future__ import annotations

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.lab.network import Lab
from tests.lab.wait import eventually


def leader_and_follower(one: Job, lab: Lab) -> tuple[Node, Node]:
    """Two nodes in step 20 of a job; etcd is on a host of its own."""
    leader = one.start(lab.hosts[1])
    leader.await_line("this node leads")
    follower = one.start(lab.hosts[2])
    one.await_world(2, after_step=19)
    assert not follower.says("this node leads")
    return leader, follower


def family_goes(node: Node, pids: list[int]) -> None:
    assert node.host is not None
    eventually(
        lambda: node.host is not None and not set(pids) & set(node.host.pids()),
        5.0,
        "everything below the killed agent ends",
    )


def test_an_agent_is_killed(job: MakeJob, lab: Lab) -> None:
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    leader, follower = leader_and_follower(one, lab)
    family = follower.family
    follower.kill_agent()
    family_goes(follower, family)
    lost = one.await_world(1, after_step=one.last_world(2))
    leader.await_line("lost", "1 worker on 1 node")
    again = one.start(lab.hosts[2])
    one.await_world(2, after_step=lost)
    one.finish([0, -9, 0])
    assert again.says("job", "succeeded")
    one.check(finished=2)


def test_the_leaders_agent_is_killed(job: MakeJob, lab: Lab) -> None:
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    leader, follower = leader_and_follower(one, lab)
    family = leader.family
    leader.kill_agent()
    family_goes(leader, family)
    follower.await_line("this node leads")
    lost = one.await_world(1, after_step=one.last_world(2))
    again = one.start(lab.hosts[1])
    one.await_world(2, after_step=lost)
    one.finish([-9, 0, 0])
    assert again.says("job", "succeeded")
    one.check(finished=2)


def test_a_host_that_was_cut_off_comes_back_without_harm(job: MakeJob, lab: Lab) -> None:
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2")
    leader, follower = leader_and_follower(one, lab)
    workers = follower.workers
    lab.hosts[2].cut()
    leader.await_line("lost", "1 worker on 1 node")
    alone = one.await_world(1, after_step=one.last_world(2))
    follower.await_line("etcd does not answer")
    lab.hosts[2].heal()
    one.await_world(2, after_step=alone)
    assert follower.workers == workers, "the process survives"
    one.finish()
    one.check(finished=2)


def test_the_leaders_host_is_cut_off_and_comes_back(job: MakeJob, lab: Lab) -> None:
    # no lease ends while it is cut off: only a confirmed death can end its part
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:2", options=["--rdzv-conf", "lease_ttl=60"])
    leader, follower = leader_and_follower(one, lab)
    workers = leader.workers
    keys = JobKeys(one.job_id)
    [led] = cluster.history(keys.leader)
    assert led.value is not None
    agent_key = keys.agent(pb.Leader.FromString(led.value).agent_id)
    lab.hosts[1].cut()
    follower.await_line("this node leads")
    follower.await_line("lost", "1 worker on 1 node")
    alone = one.await_world(1, after_step=one.last_world(2))
    removed = [
        next(change.revision for change in cluster.history(key) if change.value is None)
        for key in (keys.leader, agent_key)
    ]
    assert removed[0] == removed[1], "its part goes with its leadership: the next leader need not ask again"
    lab.hosts[1].heal()
    one.await_world(2, after_step=alone)
    assert leader.workers == workers, "the process survives"
    one.finish()
    one.check(finished=2)
