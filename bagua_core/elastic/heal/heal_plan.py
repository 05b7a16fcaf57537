"""Decides which members hold the job's state, which copy it, and when. All members decide alike, from their names.

Owns rules 3 and 4 of a step. Pure: knows no tensors and no sockets. Every member calls it with the same
arguments: they are indexed by global_rank and come from the exchange and the generation's record.
Invariants: a holder is never written to; of several complete states one that no member reads stays untouched until
another copy is verified (`spared`); a half-written copy is not a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_contract.records import StateName
from bagua_core.elastic.state.committed_state import Remains
from bagua_core.errors import InfrastructureLost


class StateGone(InfrastructureLost, RuntimeError):
    """No member has the job's state any more. ranks: those that must not go on with what they have."""

    def __init__(self, ranks: tuple[int, ...], why: str = "") -> None:
        super().__init__(
            why
            or f"global ranks {list(ranks)} were copying the job's state in place when its source was lost, and no "
            "member of this generation has it whole"
        )
        self.ranks = ranks


@dataclass(frozen=True, slots=True)
class HealPlan:
    """The actions by which members enter a generation; ranks are of that generation.

    furthest: the job's state. holders: those that have it. at_once: copy it before any member goes on. beside: copy it
    beside the generation's first step, in which they have a share of 0 (the shadow step). initial: no step was ever
    committed; the initial state of its one holder is the job's. newcomers: came without any state, so they take part in
    nothing before their first step. spared: of those at once, one that copies only when all others have verified
    theirs, for until then it holds the only complete state that is neither read nor written. one_source: holders'
    parameters differ by the algorithm's nature, so a copy must come from one of them. replaying: of those at once, the
    ones that have every step of the holders and miss only results of collectives outside steps; they copy these results
    and keep their own state, because the holders' scripts may have gone on. striping: the holders that send, if not
    all; they agree in the layout of what they send. void: initial, and no member has an initial state, not the holder
    either: the job goes on from a checkpoint or not with these processes.
    """

    furthest: StateName
    holders: tuple[int, ...]
    at_once: frozenset[int]
    beside: frozenset[int]
    initial: bool
    reason: str
    newcomers: frozenset[int] = frozenset()
    spared: frozenset[int] = frozenset()
    one_source: bool = False
    replaying: frozenset[int] = frozenset()
    striping: tuple[int, ...] = ()
    void: bool = False

    def __post_init__(self) -> None:
        # no copy may ever be written over by another
        writes_over_holder = not self.holders or self.healing & set(self.holders)
        if writes_over_holder or not self.spared <= self.at_once or not self.replaying <= self.at_once:
            raise ValueError(f"not a plan: {self}")

    @property
    def sources(self) -> tuple[int, ...]:
        """The holders that send, striped if several."""
        return self.holders[:1] if self.one_source else self.striping or self.holders

    @property
    def rounds(self) -> tuple[frozenset[int], ...]:
        """The members that copy at once, round by round: a round begins when all earlier copies are verified."""
        return tuple(r for r in (self.at_once - self.spared - self.replaying, self.spared) if r)

    @property
    def healing(self) -> frozenset[int]:
        """All members that copy, now or in the shadow step. Only `beside` is healing in the first StepPlan."""
        return self.at_once | self.beside


def counted_name(name: StateName, since_generation: int) -> StateName:
    """Returns the name of a member that counts: none, unless it committed while it was a member without interruption.

    A worker that was dropped, rightly or not, may carry steps that the job has since done otherwise; its placement then
    says a `since_generation` after its last commit, even if it never noticed.
    """
    return name if name.generation >= since_generation else StateName()


def remains_of(name: StateName, since_generation: int, remains: Remains) -> Remains:
    """Returns what a member's tensors hold, if its name does not count."""
    dropped = not name.is_none and counted_name(name, since_generation).is_none
    return max(remains, Remains.LEFT_OUT) if dropped else remains


def plan(
    names: Sequence[StateName],
    outside: Sequence[bool],
    since: Sequence[int],
    stages: Sequence[bool] | None = None,
    remains: Sequence[Remains] | None = None,
    equal_states: bool = True,
    layouts: Sequence[int] | None = None,
    joining: Sequence[bool] | None = None,
    parts: Sequence[int] | None = None,
) -> HealPlan:
    """Decides which members hold the job's state, which copy it, and when.

    names, outside (is outside a step), since (`Placement.since_generation`), stages (keeps its own state until a copy
    is verified; default: all), remains (default: untouched), layouts (digest of the layout of its state; default: all
    alike), joining (has committed no step since it joined; default: as the names say), parts (final parts of the step
    under way; default: 0), by global_rank. equal_states: of all holders.

    Raises ValueError when they do not describe the same members, StateGone.
    """
    stages = [True] * len(names) if stages is None else stages
    remains = [Remains.UNTOUCHED] * len(names) if remains is None else remains
    layouts = [0] * len(names) if layouts is None else layouts
    joining = [False] * len(names) if joining is None else joining
    parts = [0] * len(names) if parts is None else parts
    rows = (names, outside, since, stages, remains, layouts, joining, parts)
    lengths = {len(row) for row in rows}
    if lengths != {len(names)} or not names:
        raise ValueError(f"rows of {sorted(lengths)} members: not one world")
    counted = [counted_name(name, first) for name, first in zip(names, since, strict=True)]
    furthest = max(counted)
    if furthest.is_none:
        return _initial([remains_of(*row) for row in zip(names, since, remains, strict=True)])
    holders = tuple(r for r, name in enumerate(counted) if name == furthest)
    # One that joined and copied at once has not followed what the scripts of the others did since then.
    holders = tuple(r for r in holders if not joining[r]) or holders
    healing = frozenset(range(len(names))) - frozenset(holders)
    # A member that is one commit behind may stand before the same evaluation as the others, and must not go
    # into it with old parameters: only those without any state copy beside the step. One that is outside a step
    # without a state lost it in a copy: it is in the middle of that collective, unlike a joiner.
    newcomers = frozenset(r for r in healing if (counted[r].is_none or joining[r]) and not outside[r])
    beside = newcomers if not any(outside) else frozenset()
    at_once = healing - beside
    replaying = frozenset(
        r
        for r in at_once
        if outside[r] and counted[r].step == furthest.step and not counted[r].is_none and not any(parts)
    )
    spared = _spared(counted, holders, at_once, stages) if not replaying else frozenset()
    striping = tuple(r for r in holders if layouts[r] == layouts[holders[0]])
    if not healing:
        reason = "all members have the same state"
    else:
        reason = f"ranks {sorted(at_once)} copy at once, ranks {sorted(beside)} beside the first step"
    if spared:
        reason += f", ranks {sorted(spared)} when the others have"
    if replaying:
        reason += f"; ranks {sorted(replaying)} only results of collectives"
    if striping != holders:
        reason += (
            f"; ranks {sorted(set(holders) - set(striping))} send nothing, their state has another layout"
        )
    return HealPlan(
        furthest,
        holders,
        at_once,
        beside,
        False,
        reason,
        newcomers,
        spared,
        not equal_states,
        replaying,
        striping,
    )


def _initial(remains: Sequence[Remains]) -> HealPlan:
    whole = [r for r, left in enumerate(remains) if left is Remains.UNTOUCHED]
    trained = [r for r, left in enumerate(remains) if left is Remains.LEFT_OUT]
    if Remains.HALF_COMMITTED in remains or not (whole or trained):
        # The job has committed steps, or may have no initial state as a script built it: not to be begun anew here.
        raise StateGone(tuple(r for r, left in enumerate(remains) if r not in {*whole, *trained}))
    # Scripts need not build equal initial parameters, and no member may commit on unequal ones.
    holder = (whole or trained)[0]
    return HealPlan(
        furthest=StateName(),
        holders=(holder,),
        at_once=frozenset(range(len(remains))) - {holder},
        beside=frozenset(),
        initial=True,
        reason=f"no step was ever committed: rank {holder}'s initial state is the job's"
        if whole
        else "no member has a state that counts, nor an initial one",
        void=not whole,
    )


def _spared(
    counted: Sequence[StateName], holders: tuple[int, ...], at_once: frozenset[int], stages: Sequence[bool]
) -> frozenset[int]:
    """Returns the member that waits with its copy, if one must.

    The source may die in the middle of a copy. Then there must be another complete state: of a second holder, of a
    member that is behind and stages, or of one that has not begun to write over its own.
    """
    complete = [r for r in sorted(at_once) if not counted[r].is_none]
    if len(holders) > 1 or any(stages[r] for r in complete) or not complete or len(at_once) < 2:
        # There is one; or no other member copies at once, so that waiting would gain nothing
        return frozenset()
    return frozenset({max(complete, key=lambda r: (counted[r], -r))})
