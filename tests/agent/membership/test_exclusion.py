"""The nodes left out of a generation that does not work, for how long, and how soon it is tried again."""

from __future__ import annotations

import pytest

from bagua_agent.base.backoff import delay_s
from bagua_agent.membership.exclusion import SuspectNode, exclusion_options, quarantined
from bagua_agent.membership.policy import Policy


def nodes(names: str, holders: str = "") -> list[SuspectNode]:
    """ "ab" in rank order; holders: those with the state, all by default."""
    return [SuspectNode(n, f"host-{n}", n in (holders or names)) for n in names]


def pairs(text: str) -> list[tuple[str, str]]:
    """ "ab ca": a names b, c names a."""
    return [(p[0], p[1]) for p in text.split()]


def first(names: str, accusations: str, holders: str = "", may_go: str | None = None) -> str:
    return "".join(sorted(exclusion_options(nodes(names, holders), pairs(accusations), may_go)[0].agent_ids))


@pytest.mark.parametrize(
    ("names", "accusations", "holders", "goes"),
    [
        ("abc", "ac bc", "", "c"),
        ("abc", "ab cb", "", "b"),
        ("abc", "ba ca", "", "a"),  # the first in rank is no better than others
        ("abc", "ab ba", "", "b"),  # of two that name each other, the later in rank
        ("abc", "ab ba", "b", "a"),  # rather one without the state
        ("abc", "ab ba ca", "", "b"),  # c only saw that a gave up
        ("abc", "ab bc ca", "", "c"),  # says nothing: the last in rank
        ("abc", "", "", "c"),
        ("abc", "", "c", "b"),
        ("abcde", "ac ca ad da ae ea bc cb bd db be eb", "", "ab"),  # two sides: the smaller
        ("abcd", "ab ba cd dc", "", "bd"),
        ("abc", "aa bb", "", "c"),  # every host reaches itself
        ("abc", "ax xa", "", "c"),  # who is not in it says nothing
    ],
)
def test_who_goes_first(names: str, accusations: str, holders: str, goes: str) -> None:
    assert first(names, accusations, holders) == goes


def test_only_who_may_go_goes() -> None:
    assert first("abc", "ab ba", may_go="ac") == "a"
    assert [w.agent_ids for w in exclusion_options(nodes("abc"), pairs("ab ba"), "c")] == [{"c"}]
    assert exclusion_options(nodes("abc"), [], ()) == []


def test_one_node_alone_has_no_way_out() -> None:
    assert exclusion_options(nodes("a"), []) == []


def test_every_node_is_a_way_and_none_twice() -> None:
    ways = [w.agent_ids for w in exclusion_options(nodes("abc"), pairs("ab ba"))]
    assert ways == [{"b"}, {"a"}, {"c"}]


def test_a_node_that_was_left_out_less_often_goes_before_the_last_in_rank() -> None:
    often = [*nodes("ab"), SuspectNode("c", "host-c", True, times_left_out=1)]
    assert exclusion_options(often, [])[0].agent_ids == {"b"}


def test_it_names_the_nodes_that_cannot_reach_each_other() -> None:
    assert (
        exclusion_options(nodes("abc"), pairs("ab ba"))[0].why == "host-a and host-b can't reach each other"
    )
    assert (
        exclusion_options(nodes("abc"), pairs("ab cb"))[0].why == "host-b can't be reached by host-a, host-c"
    )


def test_a_quarantine_doubles_each_time_and_is_forgotten_at_last() -> None:
    policy = Policy(quarantine_first_s=10.0, quarantine_longest_s=40.0)
    once = quarantined({}, ["a"], "why", 100.0, policy)
    assert (once["a"].until_s, once["a"].times) == (110.0, 1)
    twice = quarantined(once, ["a"], "why", 120.0, policy)
    assert (twice["a"].until_s, twice["a"].times) == (140.0, 2)
    assert quarantined(twice, ["a"], "why", 150.0, policy)["a"].until_s == 190.0
    assert quarantined(twice, ["b"], "why", 180.0, policy).keys() == {"b"}
    assert quarantined(twice, ["a"], "why", 180.0, policy)["a"].times == 1


@pytest.mark.parametrize(
    ("failed", "expected_s"), [(0, 0.0), (1, 0.2), (2, 0.4), (5, 3.2), (6, 5.0), (9999, 5.0)]
)
def test_backoff(failed: int, expected_s: float) -> None:
    assert delay_s(failed, 0.2, 5.0) == expected_s
