"""The last agent that leaves removes the job's key pair while another one, whose lease ended, is still in the job."""

from __future__ import annotations

import signal

from bagua_agent.etcd.keys import JobKeys
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Lab
from tests.lab.wait import eventually

LEASE_ENDS_S = 15.0


def frozen_out(job: MakeJob, lab: Lab) -> tuple[EtcdCluster, Job, Node, bytes]:
    """A node that waits for others and is frozen until its keys are gone; then a second one came, left and removed the
    pair that the first one has. Also that pair."""
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="2:3")
    keys = JobKeys(one.job_id)
    first = one.start(lab.hosts[1])
    first.await_line("this node leads")
    made = cluster.standing(keys.identity)[keys.identity].value
    assert made is not None
    first.freeze_agent()
    eventually(lambda: not cluster.standing(keys.agents), LEASE_ENDS_S, "the frozen agent's key gone", 0.05)
    second = one.start(lab.hosts[2])
    second.await_line("this node leads")
    second.send(signal.SIGTERM)
    second.process.wait(LEASE_ENDS_S)
    assert keys.identity not in cluster.standing(keys.identity), "the fault: no agent seemed to be left"
    return cluster, one, first, made


def test_the_pair_is_put_again_by_the_agent_that_has_it(job: MakeJob, lab: Lab) -> None:
    cluster, one, first, made = frozen_out(job, lab)
    first.thaw_agent()
    key = JobKeys(one.job_id).identity
    eventually(
        lambda: key in cluster.standing(key), LEASE_ENDS_S, lambda: f"the pair again\n{first.log}", 0.05
    )
    assert cluster.standing(key)[key].value == made
    one.start(lab.hosts[2])
    one.await_world(2)
    one.finish([0, 128 + signal.SIGTERM, 0])


def test_an_agent_whose_pair_was_replaced_joins_again(job: MakeJob, lab: Lab) -> None:
    cluster, one, first, made = frozen_out(job, lab)
    second = one.start(lab.hosts[2])
    second.await_line("this node leads")
    key = JobKeys(one.job_id).identity
    other = cluster.standing(key)[key].value
    assert other != made, "the fault: two pairs for one job"
    first.thaw_agent()
    first.await_line("made another key pair for the job; joining again")
    one.await_world(2)
    assert cluster.standing(key)[key].value == other
    one.finish([0, 128 + signal.SIGTERM, 0])
