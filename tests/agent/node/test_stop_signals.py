"""One Ctrl-C leaves, two interrupt, three kill; a second signal of another kind kills."""

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
        ([INT, HUP], INT, Reaction.KILL),
    ],
)
def test_reaction(earlier: list[int], number: int, expected: Reaction) -> None:
    assert reaction(earlier, number) is expected
