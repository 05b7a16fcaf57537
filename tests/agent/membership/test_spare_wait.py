"""A node that the generation leaves out says why it waits; one that is in it, or not ready, says nothing."""

from __future__ import annotations

import pytest
from simulated_job import SimulatedJob

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.membership import spare_wait


def described(job: SimulatedJob, agent_id: str) -> str:
    return spare_wait.described(job.nodes[agent_id].state.view, agent_id, job.now_s)


def job_of(nodes: int, policy: SizePolicy) -> SimulatedJob:
    job = SimulatedJob(2, 4, sizes=policy)
    for _ in range(2):
        job.add_node(1)
    job.elect(job.nodes["a0"], fresh=False)
    for _ in range(4):
        job.settle(0.1)
    for _ in range(nodes - 2):
        job.add_node(1)
    for _ in range(4):
        job.settle(0.1)
    assert job.committed
    return job


@pytest.mark.parametrize(("cooldown_s", "spares"), [(0.0, 1), (60.0, 1), (60.0, 2)])
def test_why_a_ready_node_waits(cooldown_s: float, spares: int) -> None:
    job = job_of(2 + spares, SizePolicy((2, 4), cooldown_s=cooldown_s))
    said = described(job, "a2")
    if spares == 1:
        assert said.startswith("waiting for 1 more node to train on 4 (allowed sizes: 2, 4); generation ")
    else:
        assert said.startswith("waiting for the cooldown of 60 s since the last change (generation ")
        job.settle(5.0)
        assert described(job, "a2") == said, "one line, however long it waits"
    assert described(job, "a0") == "", "it is in the generation"


@pytest.mark.parametrize("policy", [SizePolicy((2, 4)), ANY_SIZE])
def test_a_spare_above_the_maximum_is_on_standby(policy: SizePolicy) -> None:
    job = job_of(5, policy)
    assert job.generation is not None and job.generation.node_count == 4
    said = described(job, "a4")
    assert said.startswith("waiting on standby: generation ") and "has 4 nodes" in said
    assert described(job, "a0") == "", "it is in the generation"
