"""Many changes in a row or at once cost few generations, little work, and no state."""

from __future__ import annotations

import time

import pytest
from simulated_job import SimulatedJob

from bagua_contract.records import GenerationKind


def started(nodes: int, least: int, most: int) -> SimulatedJob:
    job = SimulatedJob(least, most)
    for _ in range(nodes):
        job.add_node(1)
    job.elect(job.nodes["a0"], fresh=False)
    for _ in range(6):
        job.settle()
    assert job.committed
    return job


def inside(job: SimulatedJob) -> set[str]:
    assert job.generation is not None
    return {m.agent_id for m in job.generation.members}


def test_fifty_joins_at_once_are_few_generations_and_cost_little() -> None:
    job = started(2, 1, 64)
    before, began_s = len(job.records), time.process_time()
    for _ in range(50):
        job.add_node(1)
    for _ in range(8):
        job.settle(0.2)
    assert len(inside(job)) == 52
    # the first that is ready comes alone; all that became ready meanwhile come together
    assert len(job.records) - before <= 3
    assert time.process_time() - began_s < 20.0, "quadratic, not worse"


def test_a_stream_of_joins_is_a_generation_a_commit_at_most() -> None:
    job = started(1, 1, 64)
    before, steps = len(job.records), job.committed
    for _ in range(20):
        job.add_node(1)
        job.settle(0.05)
    for _ in range(8):
        job.settle(0.2)
    assert len(inside(job)) == 21
    assert len(job.records) - before <= job.committed - steps


def test_a_node_that_leaves_and_comes_back_ten_times_costs_no_step() -> None:
    job = started(2, 1, 4)
    for _ in range(10):
        job.add_node(1)
        comer = list(job.nodes.values())[-1]
        for _ in range(4):
            job.settle()
        assert comer.agent_id in inside(job)
        comer.leaving = True
        job.put_node(comer)
        for _ in range(4):
            job.settle()
        assert inside(job) == {"a0", "a1"}
    kinds = [r.kind for r in job.records.values()]
    assert GenerationKind.FAILOVER not in kinds and len(kinds) == 21


def test_a_node_whose_worker_dies_ten_times_is_let_in_each_time_without_a_quarantine() -> None:
    job = started(2, 1, 4)
    for _ in range(10):
        worker = [w for w in job.workers.values() if w.agent_id == "a1" and w.alive][-1]
        job.end(worker, well=False)
        for _ in range(6):
            job.settle()
        assert inside(job) == {"a0", "a1"}
    leader = job.nodes["a0"].state
    assert not leader.evidence.quarantines and leader.view.attempts.count == 0


@pytest.mark.parametrize("together", [True, False])
def test_two_losses_at_once(together: bool) -> None:
    job = started(4, 1, 4)
    steps = job.committed
    for agent_id in ("a1", "a3"):
        for worker in job.of(job.nodes[agent_id]):
            job.end(worker, well=False)
        job.kill_node(job.nodes[agent_id])
        if not together:
            job.deliver(job.nodes["a0"])
    for _ in range(4):
        job.settle()
    assert inside(job) == {"a0", "a2"} and job.committed > steps
