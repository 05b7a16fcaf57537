"""Which agents are touched in a round of restart mode, and which of them are suspected."""

from __future__ import annotations

from collections import Counter

import pytest

from bagua_agent.leadership.host_watch import MOST_IN_A_ROUND, SILENT_ROUNDS, HostWatch
from bagua_agent.rpc.reachability import Reachability

ANSWERED, REFUSED, SILENT = Reachability.ANSWERED, Reachability.REFUSED, Reachability.SILENT


def test_a_follower_of_a_small_job_touches_the_leader_in_each_round() -> None:
    watch = HostWatch("me")
    assert [watch.next_round(["leader"], 16) for _ in range(5)] == [["leader"]] * 5


@pytest.mark.parametrize("nodes", [17, 64, 1000])
def test_followers_share_the_work(nodes: int) -> None:
    """However many they are, few of them touch the leader in a round, at least one in each, and all in turn."""
    watches = {f"agent-{n}": HostWatch(f"agent-{n}") for n in range(nodes)}
    rounds = -(-nodes // MOST_IN_A_ROUND)
    touched_by: Counter[str] = Counter()
    for _ in range(rounds):
        in_this = [name for name, watch in watches.items() if watch.next_round(["leader"], nodes)]
        assert 0 < len(in_this) < 3 * MOST_IN_A_ROUND
        touched_by.update(in_this)
    assert set(touched_by.values()) == {1} and len(touched_by) == nodes


def test_the_leader_touches_few_in_a_round_and_each_in_turn() -> None:
    watch, agents = HostWatch("leader"), [f"agent-{n}" for n in range(40)]
    touched: Counter[str] = Counter()
    for _ in range(5):
        now = watch.next_round(agents, 1)
        assert len(now) == MOST_IN_A_ROUND
        touched.update(now)
    assert set(touched) == set(agents) and set(touched.values()) == {2}


def met(*agents: str) -> HostWatch:
    watch = HostWatch("me")
    watch.touched(dict.fromkeys(agents, ANSWERED))
    return watch


def test_an_agent_that_has_never_answered_is_not_suspected() -> None:
    watch = HostWatch("me")
    for touch in (REFUSED, SILENT, SILENT, SILENT, SILENT):
        assert watch.touched({"a": touch}) == []
    watch.touched({"a": ANSWERED})
    assert watch.touched({"a": REFUSED}) == ["a"]


def test_a_refusal_is_suspected_at_once_and_silence_after_several_rounds() -> None:
    watch = met("a", "b", "c")
    assert watch.touched({"a": REFUSED, "b": SILENT, "c": ANSWERED}) == ["a"]
    for _ in range(SILENT_ROUNDS - 2):
        assert watch.touched({"b": SILENT}) == []
    assert watch.touched({"b": SILENT}) == ["b"]
    assert watch.touched({"b": SILENT}) == ["b"], "and from then on in each round"


def test_an_answer_ends_a_doubt() -> None:
    watch = met("a")
    assert [watch.touched({"a": SILENT}) for _ in range(SILENT_ROUNDS)][-1] == ["a"]
    watch.touched({"a": ANSWERED})
    assert watch.touched({"a": SILENT}) == []


def test_a_suspected_agent_is_cut_off_until_it_answers_or_is_no_target() -> None:
    watch = met("a", "b")
    watch.next_round(["a", "b"], 1)
    watch.touched({"a": REFUSED, "b": SILENT})
    assert watch.cut_off == {"a"}
    watch.touched({"a": ANSWERED})
    assert watch.cut_off == frozenset()
    watch.touched({"a": REFUSED})
    watch.next_round(["b"], 1)
    assert watch.cut_off == frozenset()


def test_a_round_that_says_nothing_changes_nothing() -> None:
    watch = met("a")
    watch.touched({"a": SILENT})
    assert watch.touched({}) == []
    assert [watch.touched({"a": SILENT}) for _ in range(2)] == [[], ["a"]]


def test_agents_in_doubt_are_touched_in_each_round_and_never_more_than_fit() -> None:
    watch = met("leader")
    watch.next_round(["leader"], 1000)
    watch.touched({"leader": SILENT})
    assert [watch.next_round(["leader"], 1000) for _ in range(70)] == [["leader"]] * 70
    many = [f"agent-{n}" for n in range(40)]
    watch.touched(dict.fromkeys(many, ANSWERED))
    watch.touched(dict.fromkeys(many, SILENT))
    assert len(watch.next_round(many, 1)) == MOST_IN_A_ROUND


def test_an_agent_that_is_no_target_any_more_is_forgotten() -> None:
    watch = met("old")
    watch.touched({"old": SILENT})
    assert watch.next_round(["new"], 1) == ["new"]
    assert watch.next_round([], 1) == []
    assert watch.touched({"old": SILENT}) == []
