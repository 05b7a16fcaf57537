"""Chooses the peers of a step's weight exchange. Pure: every rank computes the same pairs and rings without a message.

A party is what has one copy of the model to exchange: a rank, or a node whose workers average among themselves first.
Parties that only heal have no model of the job yet and no place here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bagua_core.communication.step_interface import StepPlan
from bagua_core.communication.topology.lanes import Nodes
from bagua_core.errors import UserError

PeerSelection = Callable[[int, int, int], int | None]
"""(number of the exchange, own index, count of parties) -> the peer's index, or None to sit this one out. It must be a
function of its arguments alone, for each rank asks it for all parties."""


class PeerSelectionError(UserError, ValueError):
    """A peer selection of the script returned something that is no peer, or two peers that do not name each other."""


@dataclass(frozen=True, slots=True)
class Parties:
    """The parties of a step as this rank sees them.

    ranks: of each party's speaker, in the communicator that carries the exchange, ascending. index: of the own party
    in `ranks`; None if all of it only heals. active: ranks of the own party that have the job's model. by_node:
    parties are nodes, so ranks are those of the lane of leaders. speaks: this rank is its party's speaker.
    """

    ranks: tuple[int, ...]
    index: int | None
    active: int
    by_node: bool
    speaks: bool

    @property
    def count(self) -> int:
        return len(self.ranks)


def find_parties(nodes: Nodes, plan: StepPlan, hierarchical: bool) -> Parties:
    """Returns the parties of a step. nodes: see Communicator. Where each has one worker, every rank is a party."""
    by_node = hierarchical and any(len(members) > 1 for members in nodes)
    groups = nodes if by_node else tuple((r,) for r in range(plan.world_size))
    own = next(number for number, members in enumerate(groups) if plan.global_rank in members)
    ranks = tuple(n for n, members in enumerate(groups) if not plan.healing.issuperset(members))
    return Parties(
        ranks=ranks,
        index=ranks.index(own) if own in ranks else None,
        active=len(set(groups[own]) - plan.healing),
        by_node=by_node,
        speaks=groups[own][0] == plan.global_rank,
    )


def shift_one(number: int, index: int, count: int) -> int | None:
    """Returns the peer of a party. The lower half meets the upper one, shifted by one with each exchange: after
    count/2 of them every party has met every one in the other half. With an odd count each of the lower half sits
    out in turn."""
    half = (count + 1) // 2
    peer = (number + index) % half + half if index < half else (index - half - number) % half
    return peer if peer < count else None


def peer_of(select: PeerSelection, number: int, index: int, count: int) -> int | None:
    """Returns the index of the party that `index` meets in exchange `number`. Raises PeerSelectionError, on all ranks
    alike."""
    if select is shift_one:
        return shift_one(number, index, count)
    chosen = [select(number, i, count) for i in range(count)]
    for i, peer in enumerate(chosen):
        if peer is None:
            continue
        asked = f"peer_selection({number}, {i}, {count}) is {peer!r}"
        if not isinstance(peer, int) or isinstance(peer, bool) or not 0 <= peer < count or peer == i:
            raise PeerSelectionError(f"{asked}; return None or another index from 0 to {count - 1}")
        if chosen[peer] != i:
            raise PeerSelectionError(
                f"{asked}, but for {peer} it is {chosen[peer]!r}; two peers must name each other"
            )
    return chosen[index]


def ring_neighbours(index: int, count: int) -> tuple[int, int]:
    """Returns the indices to the left and to the right; the same one twice in a ring of two, oneself in a ring of
    one."""
    return (index - 1) % count, (index + 1) % count
