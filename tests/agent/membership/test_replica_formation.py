"""Which workers form a replica, which replica is over, and the ranks of replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bagua_agent.membership.actions import WriteGeneration
from bagua_agent.membership.formation.decision import decide
from bagua_agent.membership.formation.replicas import ReplicaChanges, decide_replicas, left_over
from bagua_agent.membership.job_condition import job_condition
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.ranks import Chosen, assign
from bagua_agent.membership.replica_groups import groups
from bagua_agent.membership.view import (
    AgentView,
    DeadAgent,
    Desired,
    Evidence,
    JobView,
    MemberView,
    Quarantine,
    ReplicaView,
    SuspicionView,
)
from bagua_contract.records import Generation, GenerationKind, Stage, SuspicionKind
from bagua_contract.replica import Replica, ReplicaMember

POLICY = Policy()
NOW_S = 100.0


def job(slots: dict[str, int], *workers: str, size: int = 2, **changes: object) -> JobView:
    """slots: by agent, in join order. workers: ids as a0; all wait for a replica for long."""
    agents = {
        name: AgentView(name, f"host-{name}", count, "", False, f"{name}:1", i + 1)
        for i, (name, count) in enumerate(slots.items())
    }
    members = {
        w: MemberView(w, w[0], int(w[1]), f"{w[0]}:2", {}, 0, 10 + i, 0.0, Stage.ASSEMBLING)
        for i, w in enumerate(workers)
    }
    return replace(JobView(agents=agents, members=members, replica_size=size), **changes)  # type: ignore[arg-type]


def decided(view: JobView, now_s: float = NOW_S, evidence: Evidence | None = None) -> ReplicaChanges:
    return decide_replicas(view, evidence or Evidence("a"), now_s, POLICY)


def formed(view: JobView, now_s: float = NOW_S) -> list[tuple[str, ...]]:
    return [r.worker_ids for r in decided(view, now_s).formed]


def replica(*workers: str, over: str = "") -> Replica:
    return Replica(
        workers[0],
        tuple(ReplicaMember(w, w[0], f"host-{w[0]}", int(w[1]), f"{w[0]}:2") for w in workers),
        over=over,
    )


def having(view: JobView, *records: Replica) -> JobView:
    return replace(view, replicas={r.replica_id: ReplicaView(r, i) for i, r in enumerate(records)})


def test_whole_nodes_first_then_neighbours_in_join_order() -> None:
    view = job({"b": 3, "a": 3, "c": 2}, "a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1")
    assert formed(view) == [("b0", "b1"), ("a0", "a1"), ("c0", "c1"), ("b2", "a2")]


def test_a_replica_of_more_workers_than_a_node_has_spans_neighbours() -> None:
    view = job({"a": 2, "b": 2, "c": 2, "d": 2}, *(f"{a}{s}" for a in "dcba" for s in range(2)), size=4)
    assert formed(view) == [("a0", "a1", "b0", "b1"), ("c0", "c1", "d0", "d1")]


def test_a_record_has_the_agents_addresses() -> None:
    """In a large job the agents of a replica find each other by it alone."""
    [made] = decided(job({"a": 1, "b": 1}, "a0", "b0")).formed
    assert [m.control_address for m in made.members] == ["a:1", "b:1"]


def test_labels_of_topology_make_neighbours() -> None:
    view = job({"a": 1, "b": 1, "c": 1, "d": 1}, "a0", "b0", "c0", "d0")
    labels = {"a": "2", "b": "1", "c": "2", "d": "1"}
    agents = {name: replace(a, topology=labels[name]) for name, a in view.agents.items()}
    assert formed(replace(view, agents=agents)) == [("b0", "d0"), ("a0", "c0")]


def test_a_node_whose_workers_still_come_is_waited_for_briefly() -> None:
    view = job({"a": 2, "b": 2}, "a0", "b0")
    assert formed(view, POLICY.node_window_s - 0.1) == []
    assert decided(view, 0.1).next_at_s == POLICY.node_window_s
    assert formed(view, POLICY.node_window_s) == [("a0", "b0")]


def test_workers_of_several_nodes_are_joined_once_all_nodes_have_theirs() -> None:
    view = job({"a": 1, "b": 1, "c": 1}, "a0", "c0")
    assert formed(view, 0.1) == [], "b's worker may come, and is nearer"
    assert formed(job({"a": 1, "b": 1, "c": 1}, "a0", "c0", "b0"), 0.1) == [("a0", "b0")]


def test_a_node_that_leaves_gives_no_worker_and_the_newest_worker_of_a_slot_counts() -> None:
    view = job({"a": 1, "b": 1, "c": 1}, "a0", "b0", "c0")
    left = {**view.agents, "a": replace(view.agents["a"], leaving=True)}
    assert formed(replace(view, agents=left)) == [("b0", "c0")]
    again = replace(view.members["b0"], worker_id="b0-new", join_revision=99)
    assert formed(replace(view, members={**view.members, "b0-new": again})) == [("a0", "b0-new")]


def cut(view: JobView, of: str, *others: str) -> JobView:
    agents = {**view.agents, of: replace(view.agents[of], cut_off=frozenset(others))}
    return replace(view, agents=agents)


def test_nodes_that_have_just_failed_to_reach_each_other_form_no_replica() -> None:
    view = job({"a": 1, "b": 1, "c": 1, "d": 1}, "a0", "b0", "c0", "d0")
    assert formed(cut(view, "b", "a")) == [("a0", "c0"), ("b0", "d0")]
    assert formed(cut(view, "a", "b", "c", "d")) == [("b0", "c0")]
    assert formed(cut(cut(view, "a", "b"), "c", "d")) == [("a0", "c0"), ("b0", "d0")]


def test_two_nodes_that_are_cut_off_from_each_other_are_spares_until_one_reaches_the_other() -> None:
    view = cut(job({"a": 1, "b": 1}, "a0", "b0"), "a", "b")
    assert formed(view) == []
    assert left_over(view, job_condition(view, Evidence("a"), NOW_S, POLICY), NOW_S, POLICY) == {
        "a": 1,
        "b": 1,
    }
    assert formed(cut(view, "a")) == [("a0", "b0")]


def test_one_worker_of_three_that_is_cut_off_from_another_waits() -> None:
    view = job({"a": 1, "b": 1, "c": 1, "d": 1}, "a0", "b0", "c0", "d0", size=3)
    assert formed(cut(view, "c", "b")) == [("a0", "b0", "d0")]


def test_a_third_node_that_reaches_one_of_two_keeps_no_replica_from_the_others() -> None:
    view = job({"a": 1, "b": 1, "c": 1, "d": 1}, "a0", "b0", "c0", "d0", size=3)
    assert formed(cut(view, "b", "c", "d")) == [("a0", "c0", "d0")]
    two_each = job({"a": 2, "b": 1, "c": 2, "d": 1}, "a0", "a1", "b0", "c0", "c1", "d0", size=4)
    assert formed(cut(two_each, "b", "c", "d")) == [("a0", "a1", "c0", "c1")]


def test_nothing_is_formed_in_a_job_without_replicas_or_that_closes() -> None:
    assert decided(job({"a": 1, "b": 1}, "a0", "b0", size=1)) == ReplicaChanges()
    assert formed(job({"a": 1, "b": 1}, "a0", "b0", closing_generation=3)) == []


def test_a_replica_is_over_when_a_worker_of_it_is_gone() -> None:
    view = having(job({"a": 1, "b": 1}, "a0", "b0"), replica("a0", "b0"))
    assert decided(view).over == ()
    without = replace(view, members={"a0": view.members["a0"]})
    assert [r.over for r in decided(without).over] == ["the worker in slot 0 of host-b is gone"]
    dead = Evidence("a", dead_agents={"b": DeadAgent("b", 2, 1.0, "refused")})
    assert [r.over for r in decided(view, evidence=dead).over] == [
        "the worker in slot 0 of host-b is lost with its node"
    ]
    refused = replace(view, refused=frozenset({"a0"}))
    assert [r.over for r in decided(refused).over] == ["the worker in slot 0 of host-a was refused"]


def test_after_an_election_a_key_is_given_time_to_come_back() -> None:
    view = having(job({"a": 1, "b": 1}, "a0"), replica("a0", "b0"))
    elected = Evidence("a", elected_at_s=NOW_S)
    changes = decided(view, NOW_S, elected)
    assert (changes.over, changes.next_at_s) == ((), NOW_S + POLICY.election_grace_s)
    assert decided(view, NOW_S + POLICY.election_grace_s, elected).over


def test_a_replica_whose_loss_the_others_miss_is_over_at_once_even_after_an_election() -> None:
    group = ("a0", "b0")
    record = Generation(2, 1, GenerationKind.FAILOVER, assign([chosen(w, group) for w in group]))
    missed = SuspicionView("a0", 2, SuspicionKind.BROKEN, (), 1)
    view = having(
        job({"a": 1, "b": 1}, "a0", generation=record, suspicions={"a0": missed}), replica("a0", "b0")
    )
    assert decided(view, NOW_S, Evidence("a", elected_at_s=NOW_S)).over


def test_a_record_that_is_over_goes_with_its_last_worker() -> None:
    view = having(job({"a": 1, "b": 1}, "a0"), replica("a0", "b0", over="b0 is gone"))
    assert decided(view).forgotten == ()
    assert decided(replace(view, members={})).forgotten == ("a0",)


def test_of_two_records_that_list_a_worker_the_older_one_counts() -> None:
    view = having(
        job({"a": 1, "b": 1, "c": 1}, "a0", "b0", "c0"),
        replica("a0", "b0"),
        replica("b0", "c0", over="made up"),
    )
    assert groups(view).of == {"a0": ("a0", "b0"), "b0": ("a0", "b0")}
    assert decided(view).forgotten == ("b0",)
    assert decided(view).over == ()
    large = having(view, replica("a0", "b0", "c0"))
    assert groups(large).of == {}
    assert decided(large).forgotten == ("a0",)


def chosen(worker_id: str, group: tuple[str, ...], since: int = 1, *, holder: bool = True) -> Chosen:
    agent = worker_id[0]
    return Chosen(
        worker_id,
        agent,
        f"host-{agent}",
        int(worker_id[1]),
        "",
        f"{agent}:2",
        since,
        ord(agent),
        holder,
        group,
    )


def test_ranks_go_by_replica_and_shard() -> None:
    new, old = ("a0", "c0"), ("b0", "a1")
    placements = assign([chosen(w, new, 3, holder=False) for w in new] + [chosen(w, old) for w in old])
    assert [(p.worker_id, p.global_rank, p.replica_rank, p.shard_rank) for p in placements] == [
        ("b0", 0, 0, 0),
        ("a1", 1, 0, 1),
        ("a0", 2, 1, 0),
        ("c0", 3, 1, 1),
    ]
    assert [(p.node_rank, p.local_rank) for p in placements] == [(0, 0), (1, 1), (1, 0), (2, 0)]
    record = Generation(4, 3, GenerationKind.PLANNED, placements)
    assert Generation.decode(record.encode()) == record
    assert record.replica_size == 2


def test_a_generation_of_a_part_of_a_replica_is_refused() -> None:
    group = ("a0", "b0")
    placements = assign([chosen(w, group) for w in group])
    moved = replace(placements[1], replica_rank=1)
    with pytest.raises(ValueError, match="whole replicas of 2"):
        Generation(1, 0, GenerationKind.PLANNED, (placements[0], moved))


def test_a_replica_waits_with_the_part_of_it_that_is_in_quarantine() -> None:
    inside, outside = ("c0", "d0"), ("a0", "b0")
    record = Generation(2, 1, GenerationKind.FAILOVER, assign([chosen(w, inside) for w in inside]))
    view = having(
        job({"a": 1, "b": 1, "c": 1, "d": 1}, "a0", "b0", "c0", "d0", generation=record),
        replica(*outside),
        replica(*inside),
    )
    trains = {w: replace(m, stage=Stage.LOOP, committed_generation=2) for w, m in view.members.items()}
    view = replace(view, members=trains, desired=Desired(2, 4), committed_generation=2)
    left_out = Evidence("c", quarantines={"b": Quarantine(NOW_S + 5.0, 1, "d does not reach it")})
    decision = decide(view, left_out, NOW_S, POLICY)
    assert decision.action is None
    assert "host-b is left out (d does not reach it)" in decision.reason
    assert decision.wake_at_s == NOW_S + 5.0
    again = decide(view, Evidence("c"), NOW_S, POLICY)
    assert isinstance(again.action, WriteGeneration)
    assert again.action.generation.world_size == 4
