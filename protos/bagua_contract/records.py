"""Defines the records of one job as values: frozen, checked at birth, and their protobuf form.

Owns the meaning of the records in etcd. Knows nothing of etcd, processes or torch, so that agent and
core can share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import attrgetter
from typing import TypeVar

from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped,unused-ignore]

from bagua_contract import membership_pb2 as pb
from bagua_contract.step_settings import AS_SCRIPTED, StepSettings

M = TypeVar("M", bound=Message)

# tests/agent/etcd/test_protocol_version.py pins what it versions.
PROTOCOL_VERSION = 14
# No agent writes a record of a greater number: after it there would soon be no number left.
LARGEST_NUMBER = (1 << 63) - 1


def read_message(kind: type[M], data: bytes) -> M | None:
    """Parses a message; returns None for data that is no message of this kind."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None


@dataclass(frozen=True, slots=True, order=True)
class StateName:
    """The name of a committed state; ordered, so the greatest is the furthest.

    generation: the one of the last commit. step: steps committed. operations: collectives outside
    steps finished since then. All zero names "no state".
    """

    generation: int = 0
    step: int = 0
    operations: int = 0

    @property
    def is_none(self) -> bool:
        return self == StateName()


class GenerationKind(Enum):
    PLANNED = pb.Generation.PLANNED
    FAILOVER = pb.Generation.FAILOVER
    RESTART = pb.Generation.RESTART
    GATHERING = pb.Generation.GATHERING


class Stage(Enum):
    """A worker's progress on its way into the job; see membership.proto."""

    LOOP = pb.LOOP
    WAITING = pb.WAITING
    PREPARING = pb.PREPARING
    ASSEMBLING = pb.ASSEMBLING


class SuspicionKind(Enum):
    """The reason why a worker can't go on with its peers."""

    BROKEN = pb.Suspicion.BROKEN
    STALLED = pb.Suspicion.STALLED
    UNBUILT = pb.Suspicion.UNBUILT


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker's place in a generation. replica_rank, shard_rank: 0 in a job without replicas."""

    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    global_rank: int
    node_rank: int
    local_rank: int
    store_address: str
    since_generation: int
    join_revision: int
    holder: bool
    replica_rank: int = 0
    shard_rank: int = 0


_PLACEMENT = tuple(field.name for field in fields(Placement))  # alike in the message
_values_of = attrgetter(*_PLACEMENT)


@dataclass(frozen=True, slots=True)
class Generation:
    """A numbered, immutable list of workers with their ranks, in rank order."""

    number: int
    base: int
    kind: GenerationKind
    members: tuple[Placement, ...]
    nonce: str = ""
    reason: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    script_failures: int = 0  # RESTART only: so many of the job's budget are used
    restarts: int = 0  # RESTART only: generations before this one that ended by a worker's failure
    again: bool = False  # GATHERING only: the job trained before
    settings: StepSettings = AS_SCRIPTED  # of all steps in it; RESTART has none
    answers_at: tuple[str, ...] = ()  # of an empty record: addresses of workers that hold the state and wait

    def __post_init__(self) -> None:
        if self.number < 1:
            raise ValueError(f"generation number must be at least 1, not {self.number}")
        if [m.global_rank for m in self.members] != list(range(len(self.members))):
            raise ValueError(f"generation {self.number}: ranks are not 0..{len(self.members) - 1} in order")
        if len({m.worker_id for m in self.members}) != len(self.members):
            raise ValueError(f"generation {self.number}: a worker is listed twice")
        if (size := self.replica_size) > 1 and any(
            (m.replica_rank, m.shard_rank) != divmod(m.global_rank, size) for m in self.members
        ):
            raise ValueError(f"generation {self.number}: it does not list whole replicas of {size} workers")

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def replica_size(self) -> int:
        """The workers of each replica; 1 in a job without replicas, and of an empty record."""
        return 1 + max((m.shard_rank for m in self.members), default=0)

    @property
    def is_gathering(self) -> bool:
        """Whether its members are before the loop and hold no state."""
        return self.kind is GenerationKind.GATHERING

    @property
    def node_count(self) -> int:
        return len({m.agent_id for m in self.members})

    def placement_of(self, worker_id: str) -> Placement | None:
        return next((m for m in self.members if m.worker_id == worker_id), None)

    def encode(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    def to_proto(self) -> pb.Generation:
        return pb.Generation(
            protocol=PROTOCOL_VERSION,
            nonce=self.nonce,
            number=self.number,
            base=self.base,
            kind=self.kind.value,
            members=[pb.Placement(**dict(zip(_PLACEMENT, _values_of(m), strict=True))) for m in self.members],
            reason=self.reason,
            fingerprint=dict(self.fingerprint),
            script_failures=self.script_failures,
            restarts=self.restarts,
            again=self.again,
            answers_at=self.answers_at,
            settings=None if self.settings.is_empty else self.settings.to_proto(),
        )

    @staticmethod
    def from_proto(message: pb.Generation) -> Generation:
        """Returns the generation of a record. Raises ValueError for one that no leader of this protocol would write."""
        if message.HasField("parts"):
            # taken for a whole one it would send all workers away
            raise ValueError(
                f"generation {message.number} is a head; its members are in {message.parts.folder}"
            )
        if message.number > LARGEST_NUMBER:
            raise ValueError(f"generation {message.number} is beyond any that can follow another")
        return Generation(
            number=message.number,
            base=message.base,
            kind=GenerationKind(message.kind),
            members=tuple(Placement(*_values_of(m)) for m in message.members),
            nonce=message.nonce,
            reason=message.reason,
            fingerprint=dict(message.fingerprint),
            script_failures=message.script_failures,
            restarts=message.restarts,
            again=message.again,
            answers_at=tuple(message.answers_at),
            settings=StepSettings.from_proto(message.settings),
        )

    @staticmethod
    def decode(data: bytes) -> Generation:
        return Generation.from_proto(pb.Generation.FromString(data))
