"""The next generation can't be built, since a newcomer can't reach a member or hangs: the one in force goes on."""

from __future__ import annotations

import signal

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


@pytest.mark.long
def test_a_newcomer_that_hangs_before_it_joins_is_replaced(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(3)
    endpoints = lab.etcd(lab.hosts[0]).endpoints
    one = job(endpoints=endpoints, nodes="1:2", samples=12000, epochs=6, script=["--step-s", "0.2"])
    # time to stop the newcomer between its own word that it is ready and the generation that lists it
    first = one.start(lab.hosts[1], agent_failpoints="generation.before=delay:5@3")
    first.await_line("is in force")
    hanging = one.start(lab.hosts[2])
    first.await_line("failpoint generation.before fired: delay")
    [worker] = hanging.workers
    worker.send(signal.SIGSTOP)
    alone = one.step
    one.await_world(2, after_step=alone, deadline_s=3 * UNBUILT_BOUND_S)
    assert first.says("could not be built on"), "the fault happened"
    assert hanging.says("hung: it took no part in building generation 3")
    assert worker not in hanging.workers
    assert not first.says("did not happen"), "no step is lost"
    one.finish()
    one.check(finished=2)
