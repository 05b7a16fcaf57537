"""A worker that says nothing while others fail to build what lists it is ended, one that says anything is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_agent.membership.policy import Policy
from bagua_agent.membership.view import SuspicionView
from bagua_agent.node import live_workers
from bagua_agent.node.silent_joiners import SILENT_S, SilentJoiners, written_again
from bagua_contract.records import Generation, GenerationKind, Placement, SuspicionKind

LATE_S = SILENT_S + 1.0


def silent(joiners: SilentJoiners, number: int, listed: str, now_s: float) -> list[str]:
    return [found.worker_id for found in joiners.follow(number, listed, now_s)]


def test_a_worker_that_says_nothing_from_its_first_listing_on_is_late() -> None:
    joiners = SilentJoiners()
    assert silent(joiners, 3, "ab", 0.0) == silent(joiners, 4, "ab", SILENT_S - 1.0) == []
    found = joiners.follow(5, "", LATE_S)
    assert [f.worker_id for f in found] == ["a", "b"], "also when the record leaves it out"
    assert found[0].reason == (
        "hung: it took no part in building generation 3, and has said nothing for 91 s"
    )


def test_a_word_begins_its_time_anew_with_the_next_listing() -> None:
    joiners = SilentJoiners()
    silent(joiners, 3, "ab", 0.0)
    joiners.heard("a")
    assert silent(joiners, 4, "ab", LATE_S) == ["b"]
    joiners.heard("b")
    assert silent(joiners, 5, "", 2 * LATE_S - 2.0) == []
    assert silent(joiners, 6, "", 2 * LATE_S) == ["a"]


UNBUILT = SuspicionView("b", 3, SuspicionKind.UNBUILT, (), 1)


def planned(number: int, base: int, listed: str, kind: GenerationKind = GenerationKind.PLANNED) -> Generation:
    members = tuple(Placement(w, "a", "host-a", i, i, 0, i, "h:2", 3, 1, False) for i, w in enumerate(listed))
    return Generation(number, base, kind, members)


@pytest.mark.parametrize(
    ("before", "record", "expected"),
    [
        (planned(3, 2, "ab"), planned(4, 2, "ab"), True),
        (planned(3, 2, "ab"), planned(5, 2, "abc"), True),
        (planned(3, 2, "ab"), planned(4, 2, "a"), False),
        (planned(3, 2, "ab"), planned(4, 3, "ab"), False),
        (planned(3, 2, "ab"), planned(4, 2, "ab", GenerationKind.FAILOVER), False),
        (planned(2, 1, "ab", GenerationKind.FAILOVER), planned(3, 2, "ab"), False),
        (planned(1, 0, "ab"), planned(2, 0, "ab"), False),
        (planned(1, 0, "ab", GenerationKind.GATHERING), planned(2, 0, "ab"), False),
        (None, planned(3, 2, "ab"), False),
    ],
    ids=[
        "the same workers",
        "more workers, and a record between was not seen",
        "a joiner died or is left out",
        "the one before came into force",
        "members were lost",
        "the one before was in force at once",
        "a first generation anew",
        "after the first workers gathered",
        "the first record that this agent sees",
    ],
)
def test_records_show_that_members_could_not_build_one_of_them(
    before: Generation | None, record: Generation, expected: bool
) -> None:
    assert written_again(before, record) is expected


@pytest.mark.parametrize(
    ("suspicions", "whole", "hang_timeout_s", "ended"),
    [
        ({"b": UNBUILT}, True, 600.0, 1),
        ({}, True, 600.0, 0),
        ({"b": UNBUILT}, True, None, 0),
        ({}, False, 600.0, 1),
        ({}, False, None, 0),
    ],
    ids=[
        "members can't build it",
        "no member says so",
        "no worker is ever replaced",
        "records alone show it in a large job",
        "no worker is ever replaced in a large job",
    ],
)
def test_its_agent_ends_it_where_members_cannot_build_and_hung_workers_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
    suspicions: dict[str, SuspicionView],
    whole: bool,
    hang_timeout_s: float | None,
    ended: int,
) -> None:
    now_s, killed = [0.0], []
    monkeypatch.setattr(live_workers.time, "monotonic", lambda: now_s[0])
    workers = SimpleNamespace(get=lambda name: name == "w" or None, kill=lambda name, why: killed.append(why))
    seen = SimpleNamespace(view=SimpleNamespace(suspicions=suspicions), whole=whole)
    sessions = SimpleNamespace(tell_generation=lambda record: None)
    node = live_workers.LiveWorkers(
        cast(Any, SimpleNamespace(seen=seen)),
        cast(Any, workers),
        cast(Any, sessions),
        Policy(hang_timeout_s=hang_timeout_s),
        lambda at_s: None,
        lambda: None,
    )
    for number in (3, 4):
        node.follow(planned(number, 2, "w"))
        now_s[0] += LATE_S
    assert len(killed) == ended
