"""The states of a step on one worker, and the events that lead from one to the next.

TRANSITIONS is the whole table; the model that the tests explore uses the same one. A step is *final* in the state
FINAL and nowhere else: its latest reduction completed here, so that every rank contributed to it, and a boundary
commits it. A step that failed is rolled back at the next boundary, whatever it had reduced before; parts that an
optimizer has made final stay (CurrentStep.takes_optimizer_step).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from bagua_core.errors import InternalError


class Phase(Enum):
    __hash__ = object.__hash__  # of the one member, in C: a step looks phases up dozens of times

    BETWEEN = "between steps"  # at a boundary, or the script is outside a step
    ANNOUNCED = "announced"  # next_step() returned; the first training forward begins the step
    RUNNING = "running"  # begun; no reduction of it has completed here
    FINAL = "final"  # its latest reduction completed here
    FAILED = "failed"  # a collective of it failed here, or a backward was not finished
    ENDED = "ended"  # training is over


class Event(Enum):
    __hash__ = object.__hash__

    ANNOUNCE = "announce"
    BEGIN = "begin"
    REDUCE = "reduce"
    FAIL = "fail"
    COMMIT = "commit"
    ROLL_BACK = "roll back"
    FINISH = "finish"


TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = MappingProxyType(
    {
        (Phase.BETWEEN, Event.ANNOUNCE): Phase.ANNOUNCED,
        (Phase.BETWEEN, Event.BEGIN): Phase.RUNNING,
        (Phase.ANNOUNCED, Event.BEGIN): Phase.RUNNING,
        (Phase.RUNNING, Event.REDUCE): Phase.FINAL,
        (Phase.FINAL, Event.REDUCE): Phase.FINAL,  # another part of the step
        (Phase.RUNNING, Event.FAIL): Phase.FAILED,
        (Phase.FINAL, Event.FAIL): Phase.FAILED,  # a later part of the step
        (Phase.FAILED, Event.FAIL): Phase.FAILED,
        (Phase.FINAL, Event.COMMIT): Phase.BETWEEN,
        (Phase.FAILED, Event.ROLL_BACK): Phase.BETWEEN,
        (Phase.BETWEEN, Event.FINISH): Phase.ENDED,
        (Phase.ANNOUNCED, Event.FINISH): Phase.ENDED,
        (Phase.ENDED, Event.FINISH): Phase.ENDED,
        (Phase.ENDED, Event.ANNOUNCE): Phase.ANNOUNCED,  # a script may train on after an end
        (Phase.ENDED, Event.BEGIN): Phase.RUNNING,
    }
)

IN_STEP = frozenset({Phase.RUNNING, Phase.FINAL, Phase.FAILED})
HISTORY_LENGTH = 16


class InvalidTransition(InternalError, RuntimeError):
    """The runtime took a step's event where the table has none: a defect of Bagua, with what led to it."""


class StepStates:
    """Holds the state of the step under way."""

    def __init__(self) -> None:
        self.phase = Phase.BETWEEN
        self._recent: deque[tuple[Phase, Event, Phase, str]] = deque(maxlen=HISTORY_LENGTH)

    def take(self, event: Event, detail: str = "") -> None:
        """Goes on by `event`. Raises InvalidTransition, with the recent history."""
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            raise InvalidTransition(
                f"a step that is {self.phase.value} cannot {event.value} ({detail}); before that: "
                + ("; ".join(map(_told, self._recent)) or "nothing")
            )
        self._recent.append((self.phase, event, after, detail))
        self.phase = after


def _told(transition: tuple[Phase, Event, Phase, str]) -> str:
    before, event, after, detail = transition
    return f"{before.value} -{event.value}-> {after.value} {detail}".rstrip()
