"""Exchanges which state each member has: the first exchange of every generation.

Owns the wire form of one fixed-size row per member. The decision over the rows is heal_plan.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bagua_contract.records import Generation, StateName
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import StateGone
from bagua_core.elastic.state.committed_state import HalfCopy

_COLUMNS = 11


@dataclass(frozen=True, slots=True)
class Info:
    """One member's row. outside: it is in a collective outside a step, not at a boundary. stages: a copy would
    not touch its own state until it is verified. half: what a copy that failed has left of its state.
    layout: digest of the layout of its state. joining: it has committed no step since it joined. parts: final parts of
    the step under way. equal_states: holders have the same parameters; it follows from the algorithm, so it is not
    sent."""

    name: StateName
    outside: bool
    position: Mapping[str, int]
    stages: bool = True
    half: HalfCopy = HalfCopy.NONE
    equal_states: bool = True
    layout: int = 0
    joining: bool = False
    parts: int = 0

    def to_row(self) -> list[int]:
        return [
            self.name.generation,
            self.name.step,
            self.name.operations,
            int(self.outside),
            self.position["epoch"],
            self.position["batch"],
            int(self.stages),
            int(self.half),
            self.layout,
            int(self.joining),
            self.parts,
        ]

    @staticmethod
    def from_row(row: list[int]) -> Info:
        return Info(
            StateName(*row[:3]),
            bool(row[3]),
            {"epoch": row[4], "batch": row[5]},
            bool(row[6]),
            HalfCopy(row[7]),
            layout=row[8],
            joining=bool(row[9]),
            parts=row[10],
        )


def exchange(
    communicator: Communicator, generation: Generation, own: Info, wait: Callable[[Pending], None]
) -> tuple[heal_plan.HealPlan, list[Info]]:
    """Every member's row, and the heal plan. Raises CollectiveFailed, and StateGone on the members that must end."""
    row = torch.tensor(own.to_row(), dtype=torch.int64)
    rows = torch.zeros((communicator.world_size, _COLUMNS), dtype=torch.int64)
    wait(communicator.allgather(rows, row))
    infos = [Info.from_row(r) for r in rows.tolist()]
    since = [m.since_generation for m in generation.members]
    try:
        plan = heal_plan.plan(
            [i.name for i in infos],
            [i.outside for i in infos],
            since,
            [i.stages for i in infos],
            [i.half for i in infos],
            own.equal_states,
            [i.layout for i in infos],
            [i.joining for i in infos],
            [i.parts for i in infos],
        )
    except StateGone as error:
        if communicator.global_rank in error.ranks:
            raise
        # The others wait, as joiners do, for a member that has the state.
        raise CollectiveFailed(str(error)) from error
    return plan, infos
