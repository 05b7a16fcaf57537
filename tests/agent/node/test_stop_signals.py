"""One Ctrl-C leaves, two interrupt, three kill; a second signal of another kind kills, but not SIGHUP, nor SIGTERM to a
unit."""

from __future__ import annotations

import signal

import pytest

from bagua_agent.node.stop_signals import Reaction, reaction

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("earlier", "number", "expected"),
    [
        ([], INT, Reaction.LEAVE),
        ([], TERM, Reaction.LEAVE),
        ([INT], INT, Reaction.INTERRUPT),
        ([INT, INT], INT, Reaction.KILL),
        ([TERM], TERM, Reaction.KILL),
        ([INT], TERM, Reaction.KILL),
        ([TERM], INT, Reaction.KILL),
        ([HUP], INT, Reaction.KILL),
        ([HUP], HUP, Reaction.GO_ON),
        ([INT], HUP, Reaction.GO_ON),
        ([INT, INT], HUP, Reaction.GO_ON),
    ],
)
def test_reaction(earlier: list[int], number: int, expected: Reaction) -> None:
    assert reaction(earlier, number) is expected


def test_the_shutdown_of_a_host_does_not_end_a_unit_that_is_leaving() -> None:
    assert reaction([], TERM, is_unit=True) is Reaction.LEAVE
    assert reaction([TERM], TERM, is_unit=True) is Reaction.GO_ON
    assert reaction([INT], TERM, is_unit=True) is Reaction.GO_ON
    assert reaction([TERM], INT, is_unit=True) is Reaction.KILL
