"""Whole clusters through long histories of faults: the invariants hold, and in the end every job is served."""

from __future__ import annotations

from collections import Counter

import pytest
from simulated_cluster import SimulatedCluster

from bagua_agent.cluster.cluster_plan import JobState
from bagua_agent.cluster.cluster_view import DrainView

SEEDS = range(16)


def troubled(seed: int, ticks: int = 150) -> SimulatedCluster:
    cluster = SimulatedCluster(seed)
    for _ in range(cluster.random.randrange(3, 12)):
        cluster.add_node()
    for _ in range(ticks):
        if cluster.random.random() < 0.7:
            cluster.happen()
        cluster.tick()
    return cluster


@pytest.mark.parametrize("seed", SEEDS)
def test_the_rules_hold_and_every_job_is_served_in_the_end(seed: int) -> None:
    cluster = troubled(seed)
    cluster.calm_down()
    for _ in range(4 * 60):  # longer than any delay there is
        cluster.tick()
    # now jobs end one after another, and each that fits has its turn
    for _ in range(200):
        begun = [j for j, s in cluster.states.items() if s is JobState.RUNNING and j not in cluster.results]
        if not begun:
            break
        cluster.end_job(sorted(begun)[0])
        for _ in range(60):
            cluster.tick()
    left = {j: s for j, s in cluster.states.items() if s is not JobState.ENDED}
    view = cluster.view()
    assert not [j for j in left if cluster.fits(view, cluster.submissions[j])], left
    assert all(s is JobState.QUEUED for s in left.values()), left
    assert not any(o.job_id not in left for orders in cluster.orders.values() for o in orders)


def test_the_histories_hold_what_they_are_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        seen += troubled(seed).seen
    wanted = {"asked", "killed", "started again", "gave back", "grew", "replaced while writing"}
    wanted |= {"a job of sizes", "given back to a size", "empty orders removed", "forgot its orders"}
    assert {w for w in wanted if seen[w] < 3} == set(), seen
    assert all(seen[state.value] for state in JobState), seen


def drained_replicas(seed: int, ticks: int = 150) -> SimulatedCluster:
    """Jobs of replicas on enough nodes, which people drain and give back; now and then a unit dies."""
    cluster = SimulatedCluster(seed)
    for _ in range(14):
        cluster.add_node()
    for least, most in ((2, 2), (2, 4), (4, 6)):
        cluster.submit_replicas(least, most)
    draw = cluster.random
    for _ in range(ticks):
        node = draw.choice(list(cluster.nodes.values()))
        if node.name in cluster.drains:
            del cluster.drains[node.name]
        elif len(cluster.drains) < 2 and draw.random() < 0.4:
            cluster.drains[node.name] = DrainView(draw.random() < 0.1, "test")
        if draw.random() < 0.03 and (units := cluster.living(node)):
            cluster.end_unit(draw.choice(units), 137, "killed")
        cluster.tick()
    return cluster


@pytest.mark.parametrize("seed", SEEDS)
def test_jobs_of_replicas_leave_drained_nodes_and_keep_whole_replicas(seed: int) -> None:
    cluster = drained_replicas(seed)
    for _ in range(2 * 60):
        cluster.tick()
    left = [n for n in cluster.drains if cluster.living(cluster.nodes[n])]
    assert not left, f"{left} are drained, and jobs have not left them: {cluster.orders}"
    assert all(len(cluster.replicas[j]) == job.max_nodes // 2 for j, job in cluster.submissions.items())


def test_their_histories_hold_what_they_are_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(4):
        seen += drained_replicas(seed).seen
    wanted = {"a replica ended", "a whole replica is replaced", "gave back"}
    assert {w for w in wanted if seen[w] < 3} == set(), seen
