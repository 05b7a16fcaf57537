"""Decides when an etcd of our own starts again, and on which data, from how the last ones ended. Pure.

A series of ends begins with the end of a server that had run steadily. Its data are kept as long as they may be good;
if a server refuses them, the next one starts without data, since the job's members write their keys again from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from bagua_agent.base.backoff import delay_s

STEADY_S = 10.0  # a server that ran so long begins a new row
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
MOST_IN_VAIN = 8


class How(Enum):
    KILLED = "killed by a signal"
    ENDED = "ended by itself"
    SILENT = "ended by us, as it did not answer in time"
    NOT_STARTED = "could not be started: its address is taken, its program is gone"


@dataclass(frozen=True, slots=True)
class End:
    """The end of a server. answered: it had served before."""

    how: How
    answered: bool


@dataclass(frozen=True, slots=True)
class StartAgain:
    """Another start after a pause. empty: without the data that are there."""

    after_s: float
    empty: bool


@dataclass(frozen=True, slots=True)
class GiveUp:
    in_vain: int


def plan(row: Sequence[End]) -> StartAgain | GiveUp:
    """Decides what follows the last end. row: the ends so far, the newest last; at least one."""
    in_vain = 0
    for end in reversed(row):
        if end.answered:
            break
        in_vain += 1
    if in_vain >= MOST_IN_VAIN:
        return GiveUp(in_vain)
    # The first end says nothing about the data: it had served with them.
    after_the_first = [end.how for end in row[1:]]
    empty = How.ENDED in after_the_first or after_the_first.count(How.SILENT) >= 2
    return StartAgain(delay_s(len(after_the_first), FIRST_PAUSE_S, LONGEST_PAUSE_S), empty)
