"""A batch of events: the same picture as by one event at a time, and each mapping copied once, however many events."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

from bagua_agent.membership import events as ev
from bagua_agent.membership.policy import Policy
from bagua_agent.membership.state_machine import batch
from bagua_agent.membership.state_machine.machine import State, new_state, step_all
from bagua_agent.membership.state_machine.picture import absorb
from bagua_agent.membership.view import AgentView, Evidence, JobView, MemberView, SuspicionView
from bagua_contract.records import SuspicionKind

POLICY = Policy()
V = TypeVar("V")


def joins(count: int) -> list[ev.Event]:
    happened: list[ev.Event] = []
    for i in range(count):
        name = f"n{i:05d}"
        node = AgentView(name, name, 1, "", False, f"{name}:1", 2 * i + 1)
        happened.append(ev.AgentSeen(now_s=1.0, agent=node))
        member = MemberView(f"{name}.0", name, 0, f"{name}:2", {"model": "m"}, 0, 2 * i + 2)
        happened.append(ev.MemberReady(now_s=1.0, member=member))
    return happened


def suspects(count: int) -> list[ev.Event]:
    return [
        ev.SuspicionRaised(
            now_s=2.0, suspicion=SuspicionView(f"n{i:05d}.0", 1, SuspicionKind.BROKEN, ("n00000",), 1)
        )
        for i in range(count)
    ]


def clears(count: int) -> list[ev.Event]:
    return [ev.SuspicionCleared(now_s=3.0, worker_id=f"n{i:05d}.0") for i in range(count)]


def ends(count: int) -> list[ev.Event]:
    return [
        ev.WorkerFinished(now_s=4.0, worker_id=f"n{i:05d}.0", agent_id=f"n{i:05d}", step=7)
        for i in range(count)
    ]


def goes(count: int) -> list[ev.Event]:
    gone: list[ev.Event] = [ev.MemberGone(now_s=5.0, worker_id=f"n{i:05d}.0") for i in range(count)]
    return [*gone, *(ev.AgentGone(now_s=5.0, agent_id=f"n{i:05d}") for i in range(count))]


def leading() -> State:
    start = (
        ev.LeadershipWon(now_s=0.0, revision=1),
        ev.DesiredChanged(now_s=0.0, min_nodes=1_000_000, max_nodes=1_000_000),
    )
    return step_all(new_state("n00000"), start, POLICY).state


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of entries of each copy of a mapping that a batch made."""
    sizes: list[int] = []
    true_copy = batch.copied

    def counting(mapping: Mapping[str, V]) -> dict[str, V]:
        sizes.append(len(mapping))
        return true_copy(mapping)

    monkeypatch.setattr(batch, "copied", counting)
    return sizes


def copied_by(sizes: list[int], count: int, bursts: Sequence[Sequence[ev.Event]]) -> int:
    """Entries that the leader copies for a job of so many nodes, each burst of events being one batch."""
    sizes.clear()
    state = leading()
    for burst in bursts:
        state = step_all(state, burst, POLICY).state
    assert len(state.view.agents) == count
    return sum(sizes)


def test_what_a_leader_copies_grows_as_the_nodes_do(copied: list[int]) -> None:
    """Of a job that forms, breaks and goes on: twice the nodes, twice the entries, and few for each node."""

    def bursts(count: int) -> list[list[ev.Event]]:
        return [joins(count), suspects(count), clears(count), ends(count)]

    small, large = (copied_by(copied, n, bursts(n)) for n in (200, 400))
    assert 0 < small <= 5 * 200
    assert large <= 2 * small


def test_a_batch_is_as_one_event_at_a_time() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        known = [*joins(6), *suspects(6), *clears(6), *ends(6), *goes(6)]
        happened = sorted(draw.choices(known, k=40), key=lambda event: event.now_s)
        view, evidence = JobView(), Evidence("n00000")
        state = new_state("n00000")
        while happened:
            size = draw.randint(1, 8)
            part, happened = happened[:size], happened[size:]
            for event in part:
                view, evidence, _ = absorb(view, evidence, event, 1)
            before = state, copy.deepcopy(state)
            state = step_all(state, part, POLICY).state
            assert (state.view, state.evidence) == (view, evidence)
            # also their order, by which a leader decides
            assert [list(each) for each in (state.view.agents, state.view.members)] == [
                list(each) for each in (view.agents, view.members)
            ]
            assert before[0] == before[1], "the picture from before the batch has changed"
