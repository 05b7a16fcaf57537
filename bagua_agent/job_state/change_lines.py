"""Says each change of membership in one line of the terminal: what happened, why, and what it cost.

The cost is known once a worker here has committed its first step in the new generation, commonly within a second of
the record. The line waits for that for HOLD_S at most. After that the record is announced alone ("now", "at the next
step boundary"), and the whole line follows when the generation is in force: steps can take long, and a generation may
never be built. No loss is kept from a reader meanwhile: the end of a worker, an agent's silence and the step that did
not happen have lines of their own, which are never held. Lines of generations appear in the order of their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.base.plain_text import shortened
from bagua_agent.base.timers import Timers
from bagua_agent.job_state import console
from bagua_contract import session_pb2
from bagua_contract.records import Generation, GenerationKind, Placement

HOLD_S = 3.0  # a person who watches has read the lines of the loss by then
MOST_KEPT = 8  # generations that were formed since the newest one known to be in force here


@dataclass(frozen=True, slots=True)
class Hold:
    """The decision how long a line is held. within_s: how long the line of a new record waits for the cost of the
    change; 0: it does not."""

    within_s: float
    reason: str


def hold(generation: Generation, agent_id: str) -> Hold:
    """Decides how long the line of a record is held on the terminal of agent_id, whose workers alone report their first
    commits to it."""
    if not generation.members:
        return Hold(0.0, "no worker enters it")
    if generation.is_gathering:
        return Hold(0.0, "its workers have taken no step")
    if generation.kind is GenerationKind.RESTART:
        return Hold(0.0, "workers of restart mode tell of no step")
    if all(m.agent_id != agent_id for m in generation.members):
        return Hold(0.0, "no worker here enters it")
    return Hold(HOLD_S, "a worker here tells the cost with its first commit")


def awaits_cost(generation: Generation, agent_id: str, worker_id: str) -> bool:
    """Tells whether worker_id, which came with this generation, lost no time to it, and another worker here can say
    more."""
    return any(m.worker_id == worker_id and _is_new(m, generation) for m in generation.members) and any(
        m.agent_id == agent_id and not _is_new(m, generation) for m in generation.members
    )


def _is_new(placement: Placement, generation: Generation) -> bool:
    return placement.since_generation >= generation.number


@dataclass(slots=True)
class _Change:
    """A change whose line is held. is_announced: its record was printed alone. entered: a worker's report that can't
    give the cost."""

    before: Generation | None
    generation: Generation
    is_announced: bool = False
    entered: session_pb2.Entered | None = None


class ChangeLines:
    """Prints the lines of changes. Used in the thread of the agent's loop alone."""

    def __init__(self, terminal: console.JobTerminal, timers: Timers, agent_id: str) -> None:
        self._terminal = terminal
        self._timers = timers
        self._agent_id = agent_id
        self._changes: dict[int, _Change] = {}  # by number, which grows
        self._in_force = 0  # the newest generation that was told to be in force

    def formed(self, before: Generation | None, generation: Generation, now_s: float) -> None:
        """Takes a record that is new; `before` is the last one."""
        change = _Change(before, generation)
        number, within_s = generation.number, hold(generation, self._agent_id).within_s
        if not within_s:
            self.say_held()
            self._announce(change)
            return
        if len(self._changes) >= MOST_KEPT:
            oldest = min(self._changes)
            self._say_until(oldest)
            self._changes.pop(oldest, None)
        self._changes[number] = change
        self._timers.set(_timer(number), now_s + within_s, lambda _: self._say_until(number))

    def entered(self, worker_id: str, entered: session_pb2.Entered, now_s: float) -> None:
        """Takes the first commit of a worker here in a generation. Workers' costs differ; the line has the first."""
        number = entered.generation
        if number <= self._in_force:
            return
        change = self._changes.get(number)
        if change is None:
            self._in_force = number
            self._terminal.tell_of_worker(now_s, "in force", console.in_force(entered))
            return
        if awaits_cost(change.generation, self._agent_id, worker_id):
            if change.entered is None:
                change.entered = entered
                self._timers.set_once(_timer(number), now_s + HOLD_S, lambda _: self._say_until(number))
            return
        self._say_until(number - 1)
        self._say_in_force(change, entered)

    def say_held(self) -> None:
        """Prints the lines that are held: the agent ends, or the line of a later generation comes next."""
        self._say_until(max(self._changes, default=0))

    def _say_until(self, number: int) -> None:
        for change in [c for n, c in self._changes.items() if n <= number]:
            if change.entered is not None:
                self._say_in_force(change, change.entered)
            elif not change.is_announced:
                self._announce(change)

    def _announce(self, change: _Change) -> None:
        change.is_announced = True
        self._timers.cancel(_timer(change.generation.number))
        self._terminal.tell(console.generation_written(change.before, change.generation))

    def _say_in_force(self, change: _Change, entered: session_pb2.Entered) -> None:
        self._in_force = change.generation.number
        for number in [n for n in self._changes if n <= self._in_force]:
            self._timers.cancel(_timer(number))
            del self._changes[number]
        text = console.change_in_force(change.before, change.generation, entered)
        self._terminal.tell(shortened(text, console.LONGEST_WORKER_LINE))  # the costs' names are the worker's


def _timer(number: int) -> str:
    return f"line of generation {number}"
