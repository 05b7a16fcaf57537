"""Workers in reasons for people: which rank, on which node, and why it is gone."""

from __future__ import annotations

from dataclasses import replace

from pictures import FAILOVER, LEADER, agent, failure, member, picture, record

from bagua_agent.membership.view import DeadAgent, JobView
from bagua_agent.membership.worker_names import lost, named, nodes_of


def job(members: str, *there: str, agents: str = "ab", number: int = 2) -> JobView:
    found = [member(worker, committed=number) for worker in there]
    return picture([agent(name, slots=2) for name in agents], found, record(number, members))


def test_workers_of_a_node_are_named_together() -> None:
    view = job("a0 a1 b0 b1")
    assert named(view, ["a1"]) == "global rank 1 on host-a"
    assert named(view, ["b1", "a1", "b0"]) == "global ranks 2, 3 on host-b, global rank 1 on host-a"


def test_a_loss_has_its_cause_as_far_as_it_is_known() -> None:
    view = job("a0 a1 b0 b1", "a0")
    assert lost(view, LEADER, ["a1"]) == "lost global rank 1 on host-a"
    known = replace(view, failures={"a1": failure("a1")})
    assert lost(known, LEADER, ["a1"]) == "lost global rank 1 on host-a (ValueError: bad)"
    gone = replace(known, agents={"a": agent("a", slots=2)})
    assert lost(gone, LEADER, ["a1", "b0", "b1"]) == (
        "lost global rank 1 on host-a (ValueError: bad), global ranks 2, 3 on host-b (the agent is gone)"
    )
    silent = replace(
        LEADER, dead_agents={"b": DeadAgent("b", agent("b").join_revision, 1.0, "did not answer")}
    )
    assert lost(view, silent, ["b0"]) == "lost global rank 2 on host-b (the agent did not answer)"
    answered = replace(LEADER, dead_workers=frozenset({"a1"}))
    assert lost(view, answered, ["a1"]) == "lost global rank 1 on host-a (the agent reports its end)"


def test_ranks_are_those_of_the_generation_in_force() -> None:
    view = replace(job("a0 b0:3", number=3), earlier=(record(2, "b1 a0"),), committed_generation=2)
    assert named(view, ["a0", "b1", "b0"]) == "global rank 1 on host-a, global ranks 0, 1 on host-b"
    failed_over = replace(view, generation=record(3, "a0", kind=FAILOVER))
    assert named(failed_over, ["a0"]) == "global rank 0 on host-a"


def test_what_no_record_lists_is_named_by_its_id_and_a_long_cause_is_cut() -> None:
    assert named(job("a0", "a0", "b0"), ["b0"]) == "worker b0 on host-b"
    assert lost(job("a0"), LEADER, ["x9"]) == "lost worker x9 on an unknown node"
    wordy = replace(job("a0 b0"), failures={"b0": replace(failure("b0"), summary="x" * 10_000)})
    assert len(lost(wordy, LEADER, ["b0"])) < 300
    assert nodes_of(job("a0"), ["b", "x"]) == "host-b, x"
