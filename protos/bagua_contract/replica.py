"""Defines the record of a replica as a value: frozen, checked at birth, and its protobuf form.

A *replica* is the workers that together hold one copy of a sharded model. A job with a replica size of 1 has no such
records: each of its workers is a replica. Knows nothing of etcd, processes or torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class ReplicaMember:
    """The worker of one shard.

    store_address: host:port of its own meeting store. control_address: of its agent; empty in a record of an older
    leader.
    """

    worker_id: str
    agent_id: str
    node_name: str
    slot: int
    store_address: str
    control_address: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """The K workers of a replica, in the order of their shards. over: why it is over; empty while it is not."""

    replica_id: str
    members: tuple[ReplicaMember, ...]
    nonce: str = ""
    over: str = ""

    def __post_init__(self) -> None:
        if not self.replica_id:
            raise ValueError("a replica has no id")
        if len(self.members) < 2:
            raise ValueError(
                f"replica {self.replica_id} has {len(self.members)} workers; it needs at least 2"
            )
        if len({m.worker_id for m in self.members}) != len(self.members):
            raise ValueError(f"replica {self.replica_id} lists a worker twice")
        if any(not m.worker_id or not m.agent_id for m in self.members):
            raise ValueError(f"replica {self.replica_id} lists a worker without an id or an agent")

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """The ids of the workers, in the order of their shards."""
        return tuple(m.worker_id for m in self.members)

    @property
    def agent_ids(self) -> frozenset[str]:
        return frozenset(m.agent_id for m in self.members)

    def shard_of(self, worker_id: str) -> int | None:
        """Returns the worker's shard rank; None: it is not in this replica."""
        return next((i for i, m in enumerate(self.members) if m.worker_id == worker_id), None)

    def encode(self) -> bytes:
        return self.to_proto().SerializeToString(deterministic=True)

    def to_proto(self) -> pb.Replica:
        return pb.Replica(
            protocol=PROTOCOL_VERSION,
            nonce=self.nonce,
            replica_id=self.replica_id,
            members=[
                pb.ReplicaMember(
                    worker_id=m.worker_id,
                    agent_id=m.agent_id,
                    node_name=m.node_name,
                    slot=m.slot,
                    store_address=m.store_address,
                    control_address=m.control_address,
                )
                for m in self.members
            ],
            over=self.over,
        )

    @staticmethod
    def from_proto(message: pb.Replica) -> Replica:
        """Returns the replica of a record. Raises ValueError for one that no leader of this protocol would write."""
        return Replica(
            replica_id=message.replica_id,
            members=tuple(
                ReplicaMember(
                    m.worker_id, m.agent_id, m.node_name, m.slot, m.store_address, m.control_address
                )
                for m in message.members
            ),
            nonce=message.nonce,
            over=message.over,
        )

    @staticmethod
    def decode(data: bytes) -> Replica:
        return Replica.from_proto(pb.Replica.FromString(data))
