"""What the verdict says of a job, what it gives as the reason, and what it advises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.job_facts import JobFacts, SuspicionSeen
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.verdict import Level, verdict
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import GenerationKind
from tests.agent.observation.facts import NOW_S, agent, facts, generation, worker

KILLED = FailureView(
    "w1", "h1", 9, True, False, "killed by SIGKILL", 5, exit_code=-9, global_rank=1, log_path="/logs"
)


def series(*seen: JobFacts) -> JobSeries:
    found = JobSeries()
    for one in seen:
        found.take(one)
    return found


def result(outcome: pb.Result.Outcome, **other: Any) -> pb.Result:
    return pb.Result(outcome=outcome, reason="the reason", **other)


FAILURE = pb.Failure(
    worker_id="w1", node_name="h1", slot=0, global_rank=1, cause="ValueError: bad", log_path="/logs"
)
LOST = JobEvent("ended-w1", EventKind.WORKER_LOST, "worker lost", "h1", NOW_S - 5, worker_id="w1")


@pytest.mark.parametrize(
    ("seen", "level", "what", "why", "follows"),
    [
        (facts(), Level.GOOD, "trains with 2 workers on 2 nodes", "", ""),
        (facts(result=result(pb.Result.SUCCEEDED)), Level.GOOD, "succeeded", "the reason", ""),
        (facts(result=result(pb.Result.STOPPED)), Level.WAITING, "stopped", "the reason", "--rdzv-id demo"),
        (
            facts(result=result(pb.Result.FAILED, failure=FAILURE, casualties="and 2 casualties on 1 node")),
            Level.BAD, "ValueError: bad", "h1, slot 0, rank 1. and 2 casualties on 1 node", "/logs",
        ),
        (facts(agents=()), Level.BAD, "No node", "etcd", "--rdzv-id demo"),
        (
            facts(agents=(agent(0),), generation=None, desired=pb.Desired(min_nodes=2, max_nodes=2)),
            Level.WAITING, "1 of 2 are present", "--nnodes", "another node",
        ),
        (facts(generation=None), Level.WAITING, "starts on 2 nodes", "import torch", ""),
        (facts(generation=generation(0)), Level.BAD, "waits", "why not", "another node"),
        (
            facts(suspicions=(SuspicionSeen("w0", True, "has taken 9 s", 9.0),)),
            Level.BAD, "1 worker waits in a collective: has taken 9 s", "Not waiting: rank 1 (h1)", "stacks",
        ),
        (
            facts(agents=(agent(0, worker(0)), agent(1, answers=False))),
            Level.WARNING, "h1 does not answer", "frozen", "Look at that node",
        ),
        (
            facts(generation=replace(generation(1, kind=GenerationKind.FAILOVER), number=4)),
            Level.WARNING, "goes over to generation 4 with 1 worker", "why not", "",
        ),
        (facts(events=(LOST,), failures=(KILLED,)), Level.WARNING, "after a loss", "h1, slot 0: killed", "successor"),
        (facts(events=(replace(LOST, time_unix_s=NOW_S - 500),)), Level.GOOD, "trains", "", ""),
        (facts(desired=pb.Desired(min_nodes=1, max_nodes=5)), Level.GOOD, "trains", "up to 5 nodes", "Start bagua"),
        (
            facts(agents=(agent(0, worker(0)), agent(1, worker(1)), agent(2))),
            Level.GOOD, "trains", "h2 is on standby", "scale demo",
        ),
        (facts(spec=pb.JobSpec(mode=pb.JobSpec.RESTART)), Level.GOOD, "trains", "reports no steps", ""),
        (facts(closing=True), Level.GOOD, "finishes", "", ""),
        (facts(problem="no key pair"), Level.GOOD, "trains", "no key pair", ""),
    ],
)  # fmt: skip
def test_verdict(seen: JobFacts, level: Level, what: str, why: str, follows: str) -> None:
    said = verdict(seen, series(seen))
    assert said.level is level
    assert what in said.what and why in said.why and follows in said.next


def test_etcd_that_does_not_answer_an_agent() -> None:
    away = agent(0, worker(0))
    assert away.node is not None
    away.node.store_answers = False
    seen = facts(agents=(away, agent(1, worker(1))))
    assert "etcd does not answer h0" in verdict(seen, series(seen)).what


def test_a_job_without_steps_for_long_is_stalled() -> None:
    first, later = facts(), facts(NOW_S + 16)
    assert verdict(later, series(first, later)).what.startswith("No step was committed for 16 s")
    soon = facts(NOW_S + 14)
    assert verdict(soon, series(first, soon)).level is Level.GOOD


def test_a_rank_that_computes_longer_than_the_others_is_named() -> None:
    def look(number: int) -> JobFacts:
        steps = 10 * (number + 1)
        slow = (
            agent(0, worker(0, step=steps, computing_s=0.1 * steps)),
            agent(1, worker(1, step=steps, computing_s=0.5 * steps)),
        )
        return facts(NOW_S + 5 * number, agents=slow)

    looks = [look(number) for number in range(4)]
    assert verdict(looks[2], series(*looks[:3])).level is Level.GOOD, "two looks are not enough"
    said = verdict(looks[3], series(*looks))
    assert said.what == "Rank 1 on h1 slows the job down."
    assert "0.5 s a step, the others 0.1 s" in said.why
