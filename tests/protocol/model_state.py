"""The state of the explored protocol: workers, generations, the ledger; and which rules and faults are in force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

from bagua_contract.records import StateName
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import HealPlan
from bagua_core.elastic.membership import switch_pair
from bagua_core.elastic.state.commit_history import Entry, History, Line
from bagua_core.elastic.step.step_states import TRANSITIONS, Event, Phase

NAMES = "abcd"

# phases of a worker
WAIT, READY, CONTRIBUTED, DONE, FAILED, ENDED, LEFT, DEAD = range(8)
GONE = (ENDED, LEFT, DEAD)
PLANNED, FAILOVER = "planned", "loss"

# A state's content is all that made it: whose initial parameters, then every commit. A positive number is the
# place of a Entry in `_steps`, a negative one a collective outside steps in that generation.
Chain = tuple[int, ...]
Lines = tuple[Line, ...]
_steps: list[Entry] = []
_step_ids: dict[Entry, int] = {}
# Likewise a History, so that states are quick to compare.
_histories: list[History] = [History()]
_history_ids: dict[History, int] = {History(): 0}
DIRTY = -99  # initial "parameters" of a worker that lost its claim to a state: no worker may build on them


class Worker(NamedTuple):
    phase: int
    gen: int = 0
    round: int = 0  # of its generation: 0 exchanges the names, the others are reductions
    chain: Chain = ()
    history: int = 0  # place in `_histories`
    built: int = 0  # newest pending generation whose communicator it has built
    copied: bool = False


class Gen(NamedTuple):
    """counts: rounds each member has contributed to. vs: its v in the last of them. known: what it brought to
    the exchange (chain, history, counted name)."""

    number: int
    kind: str
    members: tuple[int, ...]
    since: tuple[int, ...]
    holder: tuple[bool, ...]
    counts: tuple[int, ...]
    vs: tuple[float, ...]
    known: tuple[tuple[Chain, int, bool] | None, ...]


class State(NamedTuple):
    workers: tuple[Worker, ...]
    gens: tuple[Gen, ...]  # the last is what the store shows
    in_force: int  # as the leader knows it
    reported: int  # bits: a commit since its join was reported
    ledger: frozenset[tuple[int, int]]  # (step id, worker)
    leaving: int  # bits
    closing: bool
    kills: int
    wrong_drops: int


class Violation(AssertionError):
    pass


@cache
def step_after(phase: Phase, *events: Event) -> Phase:
    """Where a step that is in `phase` comes by `events`, by the engine's own table."""
    for event in events:
        after = TRANSITIONS.get((phase, event))
        if after is None:
            raise Violation(f"a step that is {phase.value} cannot {event.value}")
        phase = after
    return phase


def _name(chain: Chain) -> StateName:
    steps = [c for c in chain[1:] if c >= 0]
    if len(chain) < 2:
        return StateName()
    last = chain[-1]
    operations = 0
    while chain[-1 - operations] < 0 and operations < len(chain) - 1:
        operations += 1
    return StateName(-last if last < 0 else _steps[last].generation, len(steps), operations)


_name_of = lru_cache(maxsize=None)(_name)


def _intern(step: Entry) -> int:
    if step not in _step_ids:
        _step_ids[step] = len(_steps)
        _steps.append(step)
    return _step_ids[step]


def _intern_history(history: History) -> int:
    if history not in _history_ids:
        _history_ids[history] = len(_histories)
        _histories.append(history)
    return _history_ids[history]


@dataclass(frozen=True)
class Rules:
    """The protocol's decisions; a test replaces one to show that the invariants notice."""

    plan: Callable[..., HealPlan] = heal_plan.plan
    agreed: Callable[[tuple[float, float], int], int | None] = switch_pair.agreed
    collective_completed: Callable[..., tuple[History, Lines]] = History.collective_completed
    entered: Callable[..., Lines] = History.entered
    copied: Callable[..., tuple[History, Lines]] = History.copied
    trim: Callable[[History], History] = lambda history: history
    own_line_at_commit: bool = False
    holder_by_any_commit: bool = False  # not only by one since it last joined
    forget_when_dropped: bool = True  # since_generation starts anew for a worker that a generation omitted
    holder_required: bool = True
    holder_by_carrying_over: bool = False  # a member of the generation before counts as a holder
    # whether a member of the base that a pending record left out, and that failed in the base, counts as a
    # holder once no other does: never, "always", or only together "with newcomers" of the record
    base_holds: str = ""
    planned_needs_in_force: bool = True
    second_end_collective: bool = True
    loss_shrinks_to_a_size: bool = True
    first_commit_known_by_report: bool = False  # until then the job may begin anew


@dataclass(frozen=True)
class Setup:
    """One exploration. newcomers: a fourth worker waits to join. leavers: bits that ask to go."""

    steps: int = 2
    workers: int = 3
    newcomer: bool = False
    leavers: int = 0
    kills: int = 1
    wrong_drops: int = 0
    minimum: int = 1
    sizes: tuple[int, ...] = ()  # allowed numbers of members; none: each. Not together with leavers
    unequal_start: bool = False  # generation 1 has yet to copy rank 0's initial parameters
    outside: bool = False  # holders stand outside a step whenever names are exchanged
    eager: bool = True  # the reduction of `_only_awaited`
    stop_at_end: bool = False  # explore nothing after the first rank that confirmed the end
    behind_beside: bool = False  # members one commit behind copy in the shadow step as well
    rules: Rules = field(default_factory=Rules)
