"""Who has the job's state, who copies it, and when? Decided alike by every member from the exchanged names.

Owns rules 3 and 4 of a step. Pure: knows no tensors and no sockets. Every member calls it with the same
arguments: they are indexed by global_rank and come from the exchange and the generation's record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua_contract.records import StateName


@dataclass(frozen=True, slots=True)
class HealPlan:
    """What entering a generation asks of its members; ranks are of that generation.

    furthest: the job's state. holders: those that have it. at_once: copy it before anybody goes on. beside:
    copy it beside the generation's first step, in which they have a share of 0 (the shadow step). initial: no
    step was ever committed; rank 0's initial state is the job's. newcomers: came without any state, so they take
    part in nothing before their first step.
    """

    furthest: StateName
    holders: tuple[int, ...]
    at_once: frozenset[int]
    beside: frozenset[int]
    initial: bool
    reason: str
    newcomers: frozenset[int] = frozenset()

    @property
    def healing(self) -> frozenset[int]:
        """All that copy, now or in the shadow step. Only `beside` is healing in the first StepPlan."""
        return self.at_once | self.beside

    @property
    def shadow(self) -> bool:
        return bool(self.beside)


def counted_name(name: StateName, since_generation: int) -> StateName:
    """What a member's name is worth: none, unless it committed while it was a member without interruption.

    A worker that was dropped, rightly or not, may carry steps that the job has since done otherwise; its
    placement then says a `since_generation` after its last commit, even if it never noticed.
    """
    return name if name.generation >= since_generation else StateName()


def plan(names: Sequence[StateName], outside: Sequence[bool], since: Sequence[int]) -> HealPlan:
    """names, outside (stands outside a step), since (`Placement.since_generation`): by global_rank.

    Raises ValueError when the three do not describe the same members.
    """
    if not names or not len(names) == len(outside) == len(since):
        raise ValueError(f"{len(names)} names, {len(outside)} places, {len(since)} placements: not one world")
    counted = [counted_name(name, first) for name, first in zip(names, since, strict=True)]
    furthest = max(counted)
    if furthest.is_none:
        # Scripts need not build equal initial parameters, and nobody may commit on unequal ones.
        return HealPlan(
            furthest=furthest,
            holders=(0,),
            at_once=frozenset(range(1, len(names))),
            beside=frozenset(),
            initial=True,
            reason="no step was ever committed: rank 0's initial state is the job's",
        )
    holders = tuple(r for r, name in enumerate(counted) if name == furthest)
    healing = frozenset(range(len(names))) - frozenset(holders)
    # A member that is one commit behind may stand before the same evaluation as the others, and must not go
    # into it with old parameters: only those without any state copy beside the step.
    newcomers = frozenset(r for r in healing if counted[r].is_none)
    beside = newcomers if not any(outside) else frozenset()
    at_once = healing - beside
    if not healing:
        reason = "all members have the same state"
    else:
        reason = f"ranks {sorted(at_once)} copy at once, ranks {sorted(beside)} beside the first step"
    return HealPlan(furthest, holders, at_once, beside, False, reason, newcomers)
