"""What the end of a worker calls for: every case, and what is written in which order."""

from __future__ import annotations

from itertools import product

import pytest

from bagua_agent.node.worker_exits import Consequence, LastSeen, Record, consequence

MEMBER, NO_MEMBER = LastSeen(True, False), LastSeen(False, False)
TRAINED = LastSeen(True, True)


@pytest.mark.parametrize("last", [MEMBER, NO_MEMBER, TRAINED])
def test_an_end_with_0_is_recorded(last: LastSeen) -> None:
    expected = Consequence(Record.FINISHED)
    assert consequence(0, False, last, leaving=False, stopping=False) == expected
    assert consequence(0, False, last, leaving=False, stopping=True) == expected


def test_leaving_with_0_says_nothing_about_the_end_of_the_job() -> None:
    assert consequence(0, False, MEMBER, leaving=True, stopping=True) == Consequence(Record.NONE)
    assert consequence(0, False, TRAINED, leaving=True, stopping=True) == Consequence(Record.FINISHED)


@pytest.mark.parametrize(("returncode", "leaving"), list(product([1, -9, -15], [False, True])))
def test_an_expected_end_is_no_failure(returncode: int, leaving: bool) -> None:
    assert consequence(returncode, True, MEMBER, leaving=leaving, stopping=True) == Consequence(Record.NONE)


def test_a_lost_members_key_goes_at_once() -> None:
    found = consequence(-9, False, MEMBER, leaving=False, stopping=False)
    assert found == Consequence(Record.FAILURE, at_once=True, unexpected=True)


@pytest.mark.parametrize(("script_failure", "last"), [(True, MEMBER), (True, NO_MEMBER), (False, NO_MEMBER)])
def test_a_failure_is_known_before_its_key_is_gone(script_failure: bool, last: LastSeen) -> None:
    found = consequence(1, script_failure, last, leaving=False, stopping=False)
    assert found == Consequence(Record.FAILURE, at_once=False, unexpected=True)
