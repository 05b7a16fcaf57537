"""What an agent does for the replicas of its workers: passes them on, asks workers to leave, kills them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

from bagua_agent.etcd.keys import JobKeys
from bagua_agent.job_state.context import JoinedJob
from bagua_agent.job_state.job_state import LocalJobState
from bagua_agent.membership.view import AgentView, DepartureView, JobView, ReplicaView
from bagua_agent.node.node_workers import NodeWorkers
from bagua_agent.node.replicas_here import (
    FIRST_PATIENCE_S,
    FORGOTTEN_AFTER_S,
    LONGEST_PATIENCE_S,
    ReplicasHere,
    _Cuts,
)
from bagua_agent.rpc.session_server import SessionServer
from bagua_contract import membership_pb2 as pb
from bagua_contract.replica import Replica, ReplicaMember

KEYS = JobKeys("job")
LEAVE_S = 10.0


def replica(*workers: str) -> Replica:
    return Replica(
        workers[0], tuple(ReplicaMember(w, w[0], f"host-{w[0]}", int(w[1]), "h:2") for w in workers)
    )


AB, AA = replica("a0", "b0"), replica("a1", "a2")


@dataclass
class Node:
    """Agent a with workers a0, a1, a2: a0's replica has a part on b."""

    told: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    left: list[tuple[float, list[str]]] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    alive: set[str] = field(default_factory=lambda: {"a0", "a1", "a2"})

    def __post_init__(self) -> None:
        agents = {
            name: AgentView(name, f"host-{name}", 3, "", False, f"{name}:1", i) for i, name in enumerate("ab")
        }
        self.seen = LocalJobState(pb.JobSpec(replica_size=2), JobView(agents=agents, replica_size=2))
        job = SimpleNamespace(
            keys=KEYS,
            seen=self.seen,
            agent_id="a",
            timers=SimpleNamespace(
                set=lambda name, at_s, then: self.timers.update({name: at_s}),
                cancel=lambda name: self.timers.pop(name, None),
            ),
            terminal=SimpleNamespace(
                tell=self.lines.append, tell_once=lambda topic, text: self.lines.append(text)
            ),
        )
        workers = SimpleNamespace(
            get=lambda worker_id: worker_id if worker_id in self.alive else None,
            kill=lambda worker_id, why: self.killed.append(worker_id),
        )
        sessions = SimpleNamespace(
            tell_replica=lambda replica, worker_ids: self.told.extend(worker_ids),
            tell_leave=lambda within_s, worker_ids: self.left.append((within_s, worker_ids)),
        )
        self.here = ReplicasHere(
            cast(JoinedJob, job),
            cast(NodeWorkers, workers),
            cast(SessionServer, sessions),
            LEAVE_S,
            lambda replica: None,
        )

    def sees(self, *records: Replica, now_s: float = 1.0, **changes: object) -> None:
        views = {r.replica_id: ReplicaView(r, i) for i, r in enumerate(records)}
        self.seen.view = replace(self.seen.view, replicas=views, **changes)
        self.here.look(now_s)


def over(of: Replica) -> Replica:
    return replace(of, over="a worker is gone")


def test_workers_are_told_their_replica_once_and_again_in_a_new_session() -> None:
    node = Node()
    node.sees(AB, AA)
    node.sees(AB, AA)
    assert node.told == ["a0", "a1", "a2"]
    assert node.seen.remembered == {KEYS.replica("a0"): AB.encode(), KEYS.replica("a1"): AA.encode()}
    node.here.greet("a1")
    assert node.told[3:] == ["a1"]


def test_only_workers_of_a_replica_that_is_over_are_killed() -> None:
    node = Node()
    node.sees(AB, AA)
    node.sees(AB, over(AA))
    assert node.killed == ["a1", "a2"]
    assert node.seen.remembered.keys() == {KEYS.replica("a0")}


def test_a_record_that_vanishes_kills_none() -> None:
    node = Node()
    node.sees(AB, AA)
    node.sees()
    assert node.killed == []
    assert KEYS.replica("a0") in node.seen.remembered, "it is put again"


def test_a_worker_that_ends_by_itself_takes_the_others_of_its_node_along() -> None:
    node = Node()
    node.sees(AB, AA)
    node.alive.discard("a1")
    node.here.ended("a1", unexpected=True)
    assert node.killed == ["a2"]


def test_a_worker_that_ends_as_it_should_takes_none_along() -> None:
    node = Node()
    node.sees(AB, AA)
    node.here.ended("a1", unexpected=False)
    node.here.ended("a2", unexpected=False)
    assert node.killed == []
    assert node.seen.remembered.keys() == {KEYS.replica("a0")}


def test_a_worker_leaves_with_another_node_and_has_its_time_for_it() -> None:
    node = Node()
    agents = node.seen.view.agents
    leaving = {**agents, "b": replace(agents["b"], leaving=True)}
    node.sees(AB, AA, agents=leaving)
    node.sees(AB, AA, agents=leaving)
    assert node.left == [(LEAVE_S, ["a0"])]
    assert node.here.leaves_alone("a0") and not node.here.leaves_alone("a1")
    departures = {"b0": DepartureView("b0", "host-b", 2, 4)}
    node.sees(over(AB), AA, now_s=2.0, departures=departures)
    assert (node.killed, node.timers) == ([], {"leave a0": 1.0 + LEAVE_S})
    node.sees(over(AB), AA, now_s=1.0 + LEAVE_S)
    assert node.killed == ["a0"]


def test_a_worker_that_was_asked_to_leave_is_killed_at_once_if_the_other_part_is_lost() -> None:
    node = Node()
    agents = node.seen.view.agents
    node.sees(AB, agents={**agents, "b": replace(agents["b"], leaving=True)})
    node.sees(over(AB), now_s=2.0)
    assert node.killed == ["a0"]


def test_workers_of_a_node_that_leaves_itself_may_write_their_parts() -> None:
    node = Node()
    node.sees(AB)
    node.seen.leaving_since_s = 1.0
    node.sees(over(AB))
    assert node.killed == []


def test_parts_of_a_replica_whose_hosts_do_not_reach_each_other_are_ended_each_time_later() -> None:
    node = Node()
    node.sees(AB, AA)
    node.here.lost_touch("b", 1.5)
    assert node.killed == [], "it has just begun"
    node.here.lost_touch("b", 2.5)
    assert node.killed == ["a0"]
    node.here.ended("a0", unexpected=True)
    node.alive.add("a3")
    again = replica("a3", "b1")
    node.sees(again, AA, now_s=4.0)
    node.here.lost_touch("b", 5.5)
    assert node.killed == ["a0"], "twice the time of the one before"
    node.here.lost_touch("b", 6.5)
    assert node.killed == ["a0", "a3"]
    node.here.lost_touch("c", 100.0)
    assert node.killed == ["a0", "a3"], "no part of a replica is there"


def test_a_cut_ends_a_replica_once_although_its_worker_ends_later() -> None:
    node = Node()
    node.sees(AB)
    lines = len(node.lines)
    for now_s in (2.5, 3.0, 3.5):
        node.here.lost_touch("b", now_s)
    assert node.killed == ["a0"] and len(node.lines) == lines + 1
    node.here.ended("a0", unexpected=True)
    node.alive.add("a3")
    node.sees(replica("a3", "b1"), now_s=4.0)
    node.here.lost_touch("b", 6.0)
    assert node.killed == ["a0", "a3"], "twice the time, for one cut"


def cut_again(node: Node, number: int, began_s: float, missed_s: float) -> bool:
    """Whether the node ends a replica with b of that age."""
    worker = f"a{number}"
    node.alive.add(worker)
    node.sees(replica(worker, f"b{number}"), now_s=began_s)
    node.here.lost_touch("b", missed_s)
    is_ended = worker in node.killed
    node.alive.discard(worker)
    node.here.ended(worker, unexpected=True)
    return is_ended


def test_cuts_are_forgotten_once_the_other_host_has_answered_for_long() -> None:
    node = Node()
    assert cut_again(node, 3, 0.0, FIRST_PATIENCE_S)
    node.here.lost_touch("b", 20.0)  # no part here is in a replica with it, and it is silent still
    assert not cut_again(node, 4, 20.0 + FORGOTTEN_AFTER_S - 2.0, 20.0 + FORGOTTEN_AFTER_S - 1.0)
    answers_s = 20.0 + 2 * FORGOTTEN_AFTER_S
    assert cut_again(node, 5, answers_s, answers_s + FIRST_PATIENCE_S)


def test_a_link_that_fails_again_and_again_lets_a_replica_live_at_last() -> None:
    """Each time it works for twenty seconds, so that the two hosts form a replica, and then fails for two."""
    node = Node()
    ended = [cut_again(node, n, 22.0 * n, 22.0 * n + 20.0) for n in range(9)]
    assert ended == [True] * 5 + [False] * 4


def test_after_thousands_of_cuts_a_replica_is_ended_at_the_longest_patience() -> None:
    node = Node()
    node.here._cuts["b"] = _Cuts(2000, 0.0)
    assert not cut_again(node, 3, 1.0, LONGEST_PATIENCE_S)
    assert cut_again(node, 4, 100.0, 100.0 + LONGEST_PATIENCE_S)
