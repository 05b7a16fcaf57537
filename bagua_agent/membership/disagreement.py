"""Finds members of a generation that certainly wait in different operations, and names the difference.

Pure. Members number the operations that all of them do alike (bagua_contract.collective_wait). The member that is
furthest behind is compared with each other one, at its own position: a member that passed the same operation is ahead,
and the wait of the one behind will end by itself. A member that did another operation there, or went on to a later step
without it, omitted an operation or added one, so the wait can't end. Missing parts of a report decide nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bagua_agent.base.plain_text import some

if TYPE_CHECKING:  # a command line is read without the contract
    from bagua_contract.collective_wait import CollectiveWait


MOST_GROUPS = 4
MOST_RANKS = 8


@dataclass(frozen=True, slots=True)
class MemberWait:
    """The operation that a member reported it waits in. waits_in: None if it reported no operation that can be
    compared."""

    global_rank: int
    waits_in: CollectiveWait | None


def difference(places: Iterable[MemberWait]) -> str | None:
    """Describes what the members wait in, if two of them wait in different operations. Returns None if they agree, or
    if it is not known."""
    every = sorted(places, key=lambda p: p.global_rank)
    if any(p.waits_in is None for p in every):
        return None
    behind = min(
        (p.waits_in for p in every if p.waits_in is not None), key=lambda w: w.newest.position, default=None
    )
    if behind is None or not any(p.waits_in is not None and _differs(behind, p.waits_in) for p in every):
        return None
    return described(every, {})


def described(waiting: Iterable[MemberWait], ended: Mapping[int, str]) -> str:
    """Describes in one line for people what members wait in. ended: how the members ended that don't wait, by
    global_rank."""
    groups: dict[str, list[int]] = {}
    for rank, how in sorted(ended.items()):
        groups.setdefault(how, []).append(rank)
    for place in waiting:
        groups.setdefault(_said(place.waits_in), []).append(place.global_rank)
    # The member that differs from most others is reported.
    fewest_first = sorted(groups.items(), key=lambda g: (len(g[1]), g[1]))
    said = [f"{_ranks(ranks)} {what}" for what, ranks in fewest_first[:MOST_GROUPS]]
    more = len(groups) - MOST_GROUPS
    return f"ranks disagree: {'; '.join(said)}{f'; {more} more differ' if more > 0 else ''}"


def _differs(behind: CollectiveWait, other: CollectiveWait) -> bool:
    """Tells whether `other`, which is at least as far, did something else than what `behind` waits in."""
    newest = behind.newest
    if other.operations[0].position > newest.position:
        return False  # what it did at that place is not told any more
    there = next((o for o in other.operations if o.position == newest.position), None)
    # None: it went on to a later step without it.
    return there is None or there.name != newest.name


def _said(wait: CollectiveWait | None) -> str:
    if wait is None:
        return "waits for a new generation"
    return f"waits {wait.newest.name} ({wait.call_site})"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {some(map(str, ranks), MOST_RANKS)}: each"
