"""A newcomer can't reach the member that all meet at: the next generation can't be built, the one in force goes on."""

from __future__ import annotations

import pytest

from bagua_agent.etcd.keys import JobKeys
from bagua_contract import membership_pb2 as pb
from tests.faults.conftest import MakeJob, MakeLab

# the generation in force notices nothing of it; a step takes 0.2 s, and this is a busy machine's longest pause
GAP_BOUND_S = 3.0
# workers try for a minute to meet (rendezvous.py)
UNBUILT_BOUND_S = 120.0


@pytest.mark.long
def test_a_newcomer_that_cannot_be_reached_costs_no_step(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(4)
    cluster = lab.etcd(lab.hosts[0])
    one = job(endpoints=cluster.endpoints, nodes="1:3", samples=6000, epochs=6, script=["--step-s", "0.2"])
    first, second, newcomer = lab.hosts[1:]
    nodes = [one.start(first)]
    nodes[0].await_line("this node leads")
    nodes.append(one.start(second))
    both = one.await_world(2, after_step=9)
    in_force = one.ledger.lines[-1].generation
    first.cut_to(newcomer)  # which has rank 0
    workers = [w.worker_id for node in nodes for w in node.workers]
    one.start(newcomer)
    nodes[0].await_line("could not be built on", deadline_s=UNBUILT_BOUND_S)
    during = one.await_step(one.step + 10)
    told = [
        pb.Suspicion.FromString(change.value)
        for worker_id in workers
        for change in cluster.history(JobKeys(one.job_id).suspicion(worker_id))
        if change.value is not None
    ]
    unbuilt = [s for s in told if s.kind == pb.Suspicion.UNBUILT]
    assert unbuilt, f"the fault happened: {told}"
    assert all(s.generation > in_force for s in unbuilt)
    assert not any(node.says("did not happen") for node in nodes), "no step is lost"
    one.measured("longest step while it is tried", one.largest_gap_s(both, during), GAP_BOUND_S)
    first.heal_to(newcomer)
    one.await_world(3, after_step=during, deadline_s=UNBUILT_BOUND_S)
    one.finish()
    one.check(finished=3)
