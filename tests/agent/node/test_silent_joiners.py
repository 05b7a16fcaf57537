"""A worker that says nothing while others fail to build what lists it is ended, one that says anything is not."""

from __future__ import annotations

from bagua_agent.node.silent_joiners import SILENT_S, SilentJoiners

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
