"""Data paths are cut while every agent answers: the job ends in a generation that makes progress, if the minimum
allows, and never in a tight loop of generations."""

from __future__ import annotations

import pytest
from simulated_job import POLICY, SimulatedJob

Cuts = set[tuple[str, str]]


def trained(nodes: int, least: int) -> SimulatedJob:
    job = SimulatedJob(least, nodes)
    for _ in range(nodes):
        job.add_node(1)
    job.elect(job.nodes["a0"], fresh=False)
    for _ in range(6):
        job.settle()
    assert job.committed and job.generation is not None and job.generation.node_count == nodes
    return job


def run(job: SimulatedJob, seconds: float, each_s: float = 0.1) -> int:
    """The generations written meanwhile."""
    before = len(job.records)
    for _ in range(int(seconds / each_s)):
        job.settle(each_s)
    return len(job.records) - before


def inside(job: SimulatedJob) -> set[str]:
    assert job.generation is not None
    return {m.agent_id for m in job.generation.members}


ONE_WAY = {("a0", "a1")}
ISOLATED = {(a, b) for a in ("a0", "a1", "a2") for b in ("a0", "a1", "a2") if "a2" in (a, b) and a != b}
HALVES = {(a, b) for a in ("a0", "a1", "a2") for b in ("a3", "a4")}


@pytest.mark.parametrize(
    ("nodes", "least", "cuts", "stays"),
    [
        (3, 1, ONE_WAY, {"a0", "a2"}),
        (3, 2, ONE_WAY, {"a0", "a2"}),
        (3, 2, {("a1", "a2")}, None),
        (3, 2, ISOLATED, {"a0", "a1"}),
        (2, 1, {("a0", "a1")}, {"a0"}),
        (5, 2, HALVES | {(b, a) for a, b in HALVES}, {"a0", "a1", "a2"}),
        (5, 2, HALVES, {"a0", "a1", "a2"}),
    ],
    ids=["one way", "one way, two needed", "others", "isolated", "two", "halves", "halves, one way"],
)
def test_the_job_goes_on_with_those_who_reach_each_other(
    nodes: int, least: int, cuts: Cuts, stays: set[str] | None
) -> None:
    job = trained(nodes, least)
    before = job.committed
    job.cuts = set(cuts)
    written = run(job, 6.0)
    assert job.committed > before, job.generation
    assert stays is None or inside(job) == stays
    assert written <= 8
    # Tried again after the quarantines: the others lose no step by it, and it takes few generations.
    history = [r.kind for r in job.records.values()]
    steady = job.committed
    assert run(job, 60.0, 0.2) <= 30
    assert job.committed > steady + 100
    later = list(job.records.values())[len(history) :]
    assert not [r for r in later if r.kind.name == "FAILOVER"], "no step was lost"
    job.cuts.clear()
    run(job, POLICY.quarantine_longest_s + 5.0, 1.0)
    assert len(inside(job)) == nodes, "who was left out is back"


def test_who_cannot_be_left_out_is_tried_again_ever_more_slowly() -> None:
    job = trained(2, 2)
    before = job.committed
    job.cuts = {("a0", "a1")}
    assert run(job, 60.0) <= 18
    assert job.committed == before and job.result is None
    job.cuts.clear()
    run(job, 10.0)
    assert job.committed > before


def test_a_break_that_heals_by_itself_is_made_anew_at_once_with_all() -> None:
    job = trained(3, 1)
    job.cuts = {("a0", "a1")}
    job.settle(0.1)  # seen by the workers, and made anew at once
    job.settle(0.1)
    job.cuts.clear()
    assert run(job, 1.0) <= 3
    assert inside(job) == {"a0", "a1", "a2"}


@pytest.mark.parametrize("cut", [("a2", "a0"), ("a0", "a2")])
def test_a_newcomer_that_cannot_be_reached_costs_no_step(cut: tuple[str, str]) -> None:
    job = trained(2, 1)
    job.max_nodes = 3
    job.scale(1, 3)
    job.cuts = {cut}
    job.add_node(1)
    before = len(job.records)
    run(job, 5.0)
    assert inside(job) == {"a0", "a1"}
    assert {r.kind.name for r in list(job.records.values())[before:]} == {"PLANNED"}
    assert len(job.records) - before <= POLICY.rebuilds_before_leaving_out + 1
    assert "left out" in job.generation.reason if job.generation else False
    steps = job.committed
    job.cuts.clear()
    run(job, POLICY.quarantine_first_s + 1.0)
    assert inside(job) == {"a0", "a1", "a2"} and job.committed > steps


def test_one_bad_newcomer_does_not_keep_good_ones_out() -> None:
    job = trained(2, 1)
    job.scale(1, 5)
    for _ in range(3):
        job.add_node(1)
    job.cuts = {("a3", "a0"), ("a3", "a1")}
    run(job, 30.0)
    assert inside(job) == {"a0", "a1", "a2", "a4"}
