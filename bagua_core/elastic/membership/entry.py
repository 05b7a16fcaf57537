"""Exchanges which state each member has: the first exchange of every generation.

Owns the wire form of one fixed-size row per member. The decision over the rows is heal_plan.py. Where several workers
are a replica, the rows of its shards become one: a replica has what all of its shards have.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from bagua_contract.records import Generation, StateName
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending
from bagua_core.elastic.heal import heal_plan
from bagua_core.elastic.heal.heal_plan import StateGone
from bagua_core.elastic.state.committed_state import Remains

_COLUMNS = 13


@dataclass(frozen=True, slots=True)
class Info:
    """The row of one member. outside: it is in a collective outside a step, not at a boundary. stages: a copy would not
    touch its own state until it is verified. remains: what its tensors hold if it has no name. layout: digest of the
    layout of its state. joining: it has committed no step since it joined. parts: of the step under way that are final,
    optimizer steps and exchanges of weights. kept: it has local steps of a round that is not committed. run: of the
    checkpoints that go with its state; 0 if it knows of none. equal_states: holders have the same parameters; it
    follows from the algorithm, so it is not sent."""

    name: StateName
    outside: bool
    position: Mapping[str, int]
    stages: bool = True
    remains: Remains = Remains.UNTOUCHED
    equal_states: bool = True
    layout: int = 0
    joining: bool = False
    parts: int = 0
    kept: bool = False
    run: int = 0

    def to_row(self) -> list[int]:
        return [
            self.name.generation,
            self.name.step,
            self.name.operations,
            int(self.outside),
            self.position["epoch"],
            self.position["batch"],
            int(self.stages),
            int(self.remains),
            self.layout,
            int(self.joining),
            self.parts,
            int(self.kept),
            self.run,
        ]

    @staticmethod
    def from_row(row: list[int]) -> Info:
        return Info(
            StateName(*row[:3]),
            bool(row[3]),
            {"epoch": row[4], "batch": row[5]},
            bool(row[6]),
            Remains(row[7]),
            layout=row[8],
            joining=bool(row[9]),
            parts=row[10],
            kept=bool(row[11]),
            run=row[12],
        )


def of_replica(shards: Sequence[Info], since: Sequence[int]) -> Info:
    """Returns the row of a replica. since: of each shard's placement. Its name is the least that a shard has, and
    counts only if all of theirs do."""
    if len(shards) == 1:
        return shards[0]
    first = shards[0]
    layouts = struct.pack(f"!{len(shards)}q", *(s.layout for s in shards))
    digest = hashlib.blake2b(layouts, digest_size=7).digest()
    return Info(
        min(heal_plan.counted_name(s.name, begun) for s, begun in zip(shards, since, strict=True)),
        any(s.outside for s in shards),
        first.position,
        all(s.stages for s in shards),
        max(heal_plan.remains_of(s.name, begun, s.remains) for s, begun in zip(shards, since, strict=True)),
        first.equal_states,
        int.from_bytes(digest, "big") if any(s.layout for s in shards) else 0,
        any(s.joining for s in shards),
        min(s.parts for s in shards),
        any(s.kept for s in shards),
        max(s.run for s in shards),
    )


def exchange(
    communicator: Communicator,
    generation: Generation,
    own: Info,
    wait: Callable[[Pending], None],
    replica_size: int = 1,
) -> tuple[heal_plan.HealPlan, list[Info]]:
    """Exchanges the members' rows. Returns the heal plan and every row, by replica rank. Raises CollectiveFailed, and
    StateGone on the members that must end."""
    row = torch.tensor(own.to_row(), dtype=torch.int64, device="cpu")
    rows = torch.zeros((communicator.world_size, _COLUMNS), dtype=torch.int64, device="cpu")
    wait(communicator.allgather(rows, row))
    workers = [Info.from_row(r) for r in rows.tolist()]
    since = [m.since_generation for m in generation.members]
    infos = [
        of_replica(workers[at : at + replica_size], since[at : at + replica_size])
        for at in range(0, len(workers), replica_size)
    ]
    since = since[::replica_size]
    try:
        plan = heal_plan.plan(
            [i.name for i in infos],
            [i.outside for i in infos],
            since,
            [i.stages for i in infos],
            [i.remains for i in infos],
            own.equal_states,
            [i.layout for i in infos],
            [i.joining for i in infos],
            [i.parts for i in infos],
        )
    except StateGone as error:
        if communicator.global_rank // replica_size in error.ranks:
            raise
        # The others wait, as joiners do, for a member that has the state.
        raise CollectiveFailed(str(error)) from error
    return plan, infos
