"""The schedule of faults follows from the seed alone, and no event hits the last holder of the state."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos_schedule import (
    LASTING,
    LONGEST_S,
    OF_ETCD,
    SHORTEST_S,
    Event,
    Kind,
    NodeState,
    choose,
    hit,
    schedule,
)
from benchmarks.result_file import ROOT
from tests.docs.printed import printed
from tests.lab.wait import HANG_S

FIRST_OF_SEED_0 = [
    "   1    +7.21 s  agent killed, target 654",
    "   2    +4.37 s  node leaves (SIGTERM), target 12",
    "   3    +5.25 s  etcd member restarted, target 154, for 0.91 s",
]
SEEDS = st.integers(-(2**40), 2**40)
EVENTS = st.builds(
    Event, st.just(1), st.just(1.0), st.sampled_from(Kind), st.integers(0, 999), st.just(1.0), st.booleans()
)
STATES = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans())
NODES = st.lists(STATES, max_size=5).map(
    lambda found: [
        NodeState(number, runs, runs and worker, runs and worker and committed, runs and touched)
        for number, (runs, worker, committed, touched) in enumerate(found, 1)
    ]
)


@given(SEEDS, st.integers(0, 40), st.integers(0, 40))
def test_a_shorter_schedule_begins_a_longer_one(seed: int, events: int, more: int) -> None:
    assert schedule(seed, events + more, 6.0)[:events] == schedule(seed, events, 6.0)


@given(SEEDS)
def test_every_event_is_in_its_bounds(seed: int) -> None:
    for number, event in enumerate(schedule(seed, 30, 6.0), 1):
        assert event.number == number
        assert (SHORTEST_S <= event.length_s <= LONGEST_S) if event.kind in LASTING else event.length_s == 0
        assert event.after_s <= 0.6 if event.at_once else 3.0 <= event.after_s <= 9.0
        assert number > 1 or not event.at_once


def test_another_process_makes_the_same_schedule() -> None:
    words = [sys.executable, *printed("benchmarks/README.md", "--schedule", {"1000": "25", "7": "3"})]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "77"}
    done = subprocess.run(
        words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=HANG_S, check=True
    )
    assert done.stdout.splitlines() == [str(event) for event in schedule(3, 25, 6.0)]


def test_seeds_differ_and_all_kinds_come() -> None:
    assert schedule(1, 20, 6.0) != schedule(2, 20, 6.0)
    long = schedule(1, 1000, 6.0)
    assert {event.kind for event in long} == set(Kind)
    assert sum(event.after_s for event in long) == pytest.approx(6000, rel=0.2)
    assert 50 < sum(event.at_once for event in long) < 200


def test_these_are_the_first_events_of_seed_0() -> None:
    """A change of the numbers changes what every seed means: let it be on purpose."""
    assert [str(event) for event in schedule(0, 3, 6.0)] == FIRST_OF_SEED_0


def test_no_schedule_of_nonsense() -> None:
    with pytest.raises(ValueError, match="no schedule"):
        schedule(0, -1, 6.0)
    with pytest.raises(ValueError, match="no schedule"):
        schedule(0, 1, 0.0)


@given(EVENTS, NODES)
def test_a_holder_is_left_alone(event: Event, nodes: list[NodeState]) -> None:
    what = hit(event, nodes)
    if event.kind in OF_ETCD:
        assert what is not None and (what.kind, what.host) == (event.kind, None)
        return
    if what is None:
        return
    by_number = {node.host: node for node in nodes}
    assert what.host is not None
    victim = by_number[what.host]
    if what.kind is Kind.NODE_JOINS:
        assert not victim.runs, "a join needs a free host"
        return
    assert victim.runs and not victim.touched
    left = [n for n in nodes if n.host != victim.host and n.committed and not n.touched]
    assert left, "no untouched node has the state"
    if what.kind in (Kind.WORKER_KILLED, Kind.WORKER_FROZEN):
        assert victim.has_worker


@given(EVENTS, NODES)
def test_what_can_be_done_is_done(event: Event, nodes: list[NodeState]) -> None:
    what = hit(event, nodes)
    if any(not node.runs for node in nodes):
        assert what is not None, "there is room for a join"
    if what is not None and what.kind is not event.kind:
        assert what.reason
        assert {what.kind, event.kind} != {Kind.NODE_JOINS} and what.kind in (
            Kind.NODE_JOINS,
            Kind.NODE_LEAVES,
        )


def test_the_last_node_is_not_killed_but_joined() -> None:
    alone = [NodeState(1, True, True, True), NodeState(2, False)]
    kill = Event(1, 1.0, Kind.HOST_KILLED, 0)
    what = hit(kill, alone)
    assert what is not None and (what.kind, what.host) == (Kind.NODE_JOINS, 2)
    two = [NodeState(1, True, True, True), NodeState(2, True, True, False)]
    what = hit(kill, two)
    assert what is not None and (what.kind, what.host) == (Kind.HOST_KILLED, 2), (
        "the newcomer, not the holder"
    )


def test_a_join_without_room_is_a_leave() -> None:
    full = [NodeState(number, True, True, True) for number in (1, 2)]
    what = hit(Event(1, 1.0, Kind.NODE_JOINS, 3), full)
    assert what is not None and (what.kind, what.host) == (Kind.NODE_LEAVES, 2)


def test_targets_are_abstract() -> None:
    assert [choose(number, "abc") for number in (0, 4, 302)] == ["a", "b", "c"]
    assert choose(5, []) is None
