"""What the verdict says of a job, what it gives as the reason, and what it advises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua_agent.dashboard.page_data import page_data
from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.membership.view import FailureView
from bagua_agent.observation.agent_calls import MOST_CALLED
from bagua_agent.observation.job_facts import JobFacts, SuspicionSeen
from bagua_agent.observation.series import JobSeries
from bagua_agent.observation.trouble_rules import checkpoint_step
from bagua_agent.observation.verdict import verdict
from bagua_agent.observation.verdict_parts import Level
from bagua_contract import control_pb2
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import GenerationKind
from tests.agent.observation.facts import NOW_S, agent, facts, generation, many_agents, worker

KILLED = FailureView(
    "w1", "h1", 9, True, False, "killed by SIGKILL", 5, exit_code=-9, global_rank=1, log_path="/logs"
)


def series(*seen: JobFacts) -> JobSeries:
    found = JobSeries()
    for one in seen:
        found.take(one)
    return found


def stopped(rank: int) -> control_pb2.WorkerNow:
    found = worker(rank)
    found.stopped = True
    return found


def result(outcome: pb.Result.Outcome, **other: Any) -> pb.Result:
    return pb.Result(outcome=outcome, reason="the reason", **other)


FAILURE = pb.Failure(
    worker_id="w1", node_name="h1", slot=0, global_rank=1, cause="ValueError: bad", log_path="/logs"
)
SAVED = {"checkpoint_step": 6}
FULL = {"checkpoint_step": 4, "checkpoint_trouble": "No space left on device"}
GONE = JobEvent("lost-a1-3", EventKind.NODE_LOST, "lost; generation 3 goes on without it", "h1", NOW_S - 5)
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
            Level.BAD, "Rank 1 on h1 holds the job up, for 9 s", "1 of 2 workers waits in a collective", "stacks",
        ),
        (
            facts(suspicions=(SuspicionSeen("w0", True, "x", 9.0), SuspicionSeen("w1", True, "no answer", 8.0))),
            Level.BAD, "All 2 workers wait in a collective, for 9 s", "network between them", "collectives of a rank",
        ),
        (facts(suspicions=(SuspicionSeen("w0", True, "has taken 0.3 s", 0.3),)), Level.GOOD, "trains", "", ""),
        (
            facts(agents=(agent(0, worker(0)), agent(1, stopped(1)))),
            Level.BAD, "Rank 1 on h1 is stopped", "SIGSTOP", "kill -CONT 1 on h1",
        ),
        (
            facts(store_problem="connection refused"),
            Level.WARNING, "etcd does not answer this page.", "no effect until etcd answers", "Look at etcd",
        ),
        (facts(store_problem="refused", generation=None), Level.WARNING, "etcd does not", "begins once", "etcd"),
        (
            facts(store_problem="timed out", agents=(agent(0, worker(0)), agent(1, answers=False))),
            Level.WARNING, "etcd does not answer this page, and neither does the agent of h1", "cut off", "another",
        ),
        (
            facts(agents=(agent(0, worker(0, **SAVED)), agent(1, worker(1, **FULL)))),
            Level.WARNING, "Checkpoints are not written: No space left on device",
            "part of rank 1 on h1. Training goes on; the newest checkpoint that all have written is of step 4", "room",
        ),
        (
            facts(events=(GONE,), generation=generation(1)),
            Level.WARNING, "on 1 node at 2 steps/s, after node h1 was lost", "h1 did not answer", "Look at h1",
        ),
        (
            facts(agents=(agent(0, worker(0)), agent(1, answers=False))),
            Level.WARNING, "h1 does not answer", "frozen", "Look at that node",
        ),
        (
            facts(generation=replace(generation(1, kind=GenerationKind.FAILOVER), number=4)),
            Level.WARNING, "goes over to generation 4 with 1 worker", "why not", "",
        ),
        (
            facts(events=(LOST,), failures=(KILLED,)),
            Level.WARNING, "after rank 1 on h1 was lost", "h1, slot 0: killed", "successor",
        ),
        (facts(events=(replace(LOST, time_unix_s=NOW_S - 500),)), Level.GOOD, "trains", "", ""),
        (facts(events=(GONE,)), Level.WARNING, "after node h1 was lost", "h1 did not answer", "Nothing: h1 is back"),
        (facts(desired=pb.Desired(min_nodes=1, max_nodes=5)), Level.GOOD, "trains", "up to 5 nodes", "Start bagua"),
        (
            facts(agents=(agent(0, worker(0)), agent(1, worker(1)), agent(2))),
            Level.GOOD, "trains", "h2 is on standby", "scale demo",
        ),
        (facts(spec=pb.JobSpec(mode=pb.JobSpec.RESTART)), Level.GOOD, "trains", "reports no steps", ""),
        (facts(closing=True), Level.GOOD, "finishes", "", ""),
        (facts(problem="no key pair"), Level.GOOD, "trains", "no key pair", ""),
        (facts(problem="no key pair", agents=(), generation=None), Level.WAITING, "starts.", "no key pair", ""),
        (
            facts(problem="no key pair", agents=(), generation=generation(0)),
            Level.BAD, "waits for nodes: it needs 1.", "why not", "another node",
        ),
    ],
)  # fmt: skip
def test_verdict(seen: JobFacts, level: Level, what: str, why: str, follows: str) -> None:
    said = verdict(seen, series(seen))
    assert said.level is level
    assert what in said.what and why in said.why and follows in said.next


@pytest.mark.parametrize(
    ("workers", "step"),
    [
        ([SAVED, {"checkpoint_step": 4}], 4),
        ([SAVED, {}], 6),  # where replicas differ rank 0 alone writes; a joiner has written nothing yet
        ([SAVED, {"checkpoint_trouble": "No space left on device"}], 0),
        ([SAVED, FULL], 4),
        ([{}, {}], 0),
    ],
)
def test_the_step_of_the_newest_checkpoint(workers: list[dict[str, Any]], step: int) -> None:
    agents = tuple(agent(rank, worker(rank, **saved)) for rank, saved in enumerate(workers))
    assert checkpoint_step(facts(agents=agents)) == step


def test_etcd_that_does_not_answer_an_agent() -> None:
    away = agent(0, worker(0))
    assert away.node is not None
    away.node.store_answers = False
    seen = facts(agents=(away, agent(1, worker(1))))
    assert "etcd does not answer h0" in verdict(seen, series(seen)).what


def test_what_stands_still_is_bad_and_names_the_cause_first() -> None:
    away = agent(0, worker(0))
    assert away.node is not None
    away.node.store_answers = False
    for cause, what in (
        (
            {"agents": (away, agent(1, worker(1)))},
            "etcd does not answer h0, and no step was committed for 30 s.",
        ),
        (
            {"agents": (agent(0, worker(0)), agent(1, answers=False))},
            "The agent of h1 does not answer, and no step",
        ),
        ({"suspicions": (SuspicionSeen("w0", True, "x", 0.3),)}, "Rank 1 on h1 holds the job up, for 30 s."),
    ):
        first, later = facts(), facts(NOW_S + 30, **cause)
        said = verdict(later, series(first, later))
        assert said.level is Level.BAD and said.what.startswith(what)


def test_a_silent_agent_whose_key_is_kept_alive_is_cut_off_from_the_page() -> None:
    def look(at_s: float) -> JobFacts:
        return facts(at_s, agents=(agent(0, worker(0, step=int(at_s))), agent(1, answers=False)))

    looks = [look(NOW_S + passed_s) for passed_s in (0, 10, 20)]
    assert "is frozen, cut off, or overloaded" in verdict(looks[1], series(*looks[:2])).why
    said = verdict(looks[2], series(*looks))
    assert (
        said.level is Level.WARNING and "the network between it and the host of this page is cut" in said.why
    )
    back = facts(NOW_S + 21, agents=(agent(0, worker(0, step=1100)), agent(1, worker(1))))
    again = look(NOW_S + 22)
    assert "is frozen" in verdict(again, series(*looks, back, again)).why


def test_agents_that_are_not_asked_are_not_silent() -> None:
    seen = facts(agents=many_agents(80), generation=generation(80))
    assert sum(agent.node is None for agent in seen.agents) == 80 - MOST_CALLED
    assert verdict(seen, series(seen)).level is Level.GOOD
    away = replace(seen, store_problem="refused")
    assert "neither does" not in verdict(away, series(away)).what
    one_silent = replace(seen, agents=(agent(0, answers=False), *seen.agents[1:]))
    assert verdict(one_silent, series(one_silent)).what == "The agent of h0 does not answer."


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


def test_a_slow_rank_of_a_job_with_long_steps_is_named_at_every_look() -> None:
    """Of 120 looks, one finds new computing times."""
    slow, step_s = JobSeries(), 120
    for second in range(5 * step_s):
        steps = 10 + second // step_s
        times = enumerate((0.4, 0.8))
        took = {"step_sum_s": float(step_s * steps)}
        agents = (
            agent(rank, worker(rank, step=steps, computing_s=each * steps, **took)) for rank, each in times
        )
        seen = facts(NOW_S + second, agents=tuple(agents))
        slow.take(seen)
        is_named = verdict(seen, slow).what == "Rank 1 on h1 slows the job down."
        assert is_named is (second >= 3 * step_s), second
    assert len(page_data(seen, slow, "")["heat"]["steps"]) == 4


def test_a_rank_that_computes_longer_because_it_has_more_shards_is_not_named() -> None:
    """Of 3 virtual shards rank 0 has two, rank 1 one, and of a third worker without any nothing can be said."""

    def look(number: int) -> JobFacts:
        steps = 10 * (number + 1)
        times = ((0.4, 4 / 3), (0.2, 2 / 3), (0.001, 0.0))
        agents = (
            agent(rank, worker(rank, step=steps, computing_s=each * steps, shard_share=share))
            for rank, (each, share) in enumerate(times)
        )
        return facts(NOW_S + 5 * number, agents=tuple(agents))

    looks = [look(number) for number in range(4)]
    seen = series(*looks)
    assert verdict(looks[3], seen).level is Level.GOOD
    assert seen.points[-1].computing_s == {0: pytest.approx(0.3), 1: pytest.approx(0.3)}


def test_a_worker_that_does_not_end_after_its_last_step_is_named() -> None:
    def look(after_s: float, **other: Any) -> JobFacts:
        return facts(NOW_S + after_s, closing=True, agents=(agent(0), agent(1, worker(1))), **other)

    before, first, soon, later = facts(), look(100), look(125), look(140)
    assert verdict(soon, series(before, first, soon)).level is Level.GOOD
    said = verdict(later, series(before, first, soon, later))
    assert said.level is Level.WARNING
    assert said.what == "Rank 1 on h1 has not ended, 40 s after its last step."
    assert "stacks" in said.next
    ended = replace(later, agents=(agent(0), agent(1)))
    assert verdict(ended, series(before, first, ended)).level is Level.GOOD


def test_a_pause_between_two_steps_does_not_hide_a_hang() -> None:
    def look(at_s: float, steps: int, **other: Any) -> JobFacts:
        workers = [worker(rank, step=steps, step_sum_s=float(steps)) for rank in range(2)]
        for each in workers:
            each.progress.steps_per_s = 1 / 3600  # of the step after the pause
        return facts(at_s, agents=tuple(agent(rank, each) for rank, each in enumerate(workers)), **other)

    before, after = look(NOW_S, 10), look(NOW_S + 3601, 11)
    hung = look(NOW_S + 3661, 11, suspicions=(SuspicionSeen("w0", True, "has taken 60 s", 60.0),))
    found = verdict(hung, series(before, after, hung))
    assert found.level is Level.BAD and "holds the job up" in found.what


def test_one_long_step_does_not_hide_a_hang_in_the_next_one() -> None:
    def look(at_s: float, steps: int, sum_s: float, **other: Any) -> JobFacts:
        reports = (agent(rank, worker(rank, step=steps, step_sum_s=sum_s)) for rank in range(2))
        return facts(at_s, agents=tuple(reports), **other)

    looks = [look(NOW_S + n, 10 + n, 10.0 + n) for n in range(3)]
    looks.append(look(NOW_S + 3602, 13, 3612.0))  # the script evaluates in it
    looks.append(
        look(NOW_S + 3662, 13, 3612.0, suspicions=(SuspicionSeen("w0", True, "has taken 60 s", 60.0),))
    )
    assert verdict(looks[-1], series(*looks)).level is Level.BAD


def with_loss(at_s: float, step: int, lost_unix_s: float | None) -> JobFacts:
    events = () if lost_unix_s is None else (replace(LOST, time_unix_s=lost_unix_s),)
    agents = tuple(agent(rank, worker(rank, step=step)) for rank in range(2))
    return facts(at_s, events=events, agents=agents)


@pytest.mark.parametrize("ahead_s", [-300.0, 300.0])
def test_a_loss_is_mentioned_for_a_minute_whatever_the_clock_of_its_node_says(ahead_s: float) -> None:
    lost_s = NOW_S + ahead_s
    before, seen = with_loss(NOW_S, 10, None), with_loss(NOW_S + 1, 11, lost_s)
    assert "a worker of h1 was lost" in verdict(seen, series(before, seen)).what
    later = with_loss(NOW_S + 71, 20, lost_s)
    assert verdict(later, series(before, seen, later)).level is Level.GOOD


@pytest.mark.parametrize(("ago_s", "level"), [(7200.0, Level.GOOD), (5.0, Level.WARNING)])
def test_a_loss_between_two_looks_that_are_far_apart_is_as_old_as_its_node_says(
    ago_s: float, level: Level
) -> None:
    """The page of a job is read only while a browser asks for it."""
    before, seen = with_loss(NOW_S - 86_400, 10, None), with_loss(NOW_S, 20, NOW_S - ago_s)
    assert verdict(seen, series(before, seen)).level is level


def test_a_loss_before_the_first_look_with_a_clock_ahead_is_mentioned_for_a_minute() -> None:
    first, later = with_loss(NOW_S, 10, NOW_S + 300), with_loss(NOW_S + 70, 20, NOW_S + 300)
    assert verdict(first, series(first)).level is Level.WARNING
    assert verdict(later, series(first, later)).level is Level.GOOD
