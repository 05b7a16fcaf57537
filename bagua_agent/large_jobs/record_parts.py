"""Splits a record of thousands of workers into parts and a head that points to them. Pure.

All agents watch the head. It is as long for ten thousand workers as for two hundred, except for the addresses of its
*keepers*: agents that read the parts and serve them to others, so that only a few nodes read from the store. Parts are
named by their content, so it does not matter which agent writes them, nor how often.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bagua_agent.base.ids import is_id
from bagua_agent.etcd.client import Put
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.large_jobs.limits import Limits
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import PROTOCOL_VERSION, Generation, read_message

PART_BYTES = 512 << 10  # etcd takes 1.5 MiB in one request
MOST_RECORD_BYTES = 256 << 20  # of what a stranger may have written; a million workers take less
_DIGEST_BYTES = hashlib.sha256().digest_size
MOST_PARTS = 10_000  # a record of MOST_RECORD_BYTES has 512; each is a name to be held


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a record that is stored in parts. packed_sha256: of all parts, one after the other. keepers: control
    addresses, host:port."""

    number: int
    folder: str
    parts: int
    packed_sha256: bytes
    node_count: int
    keepers: tuple[str, ...]

    def keys(self, keys: JobKeys) -> list[str]:
        return [keys.record_part(self.folder, i) for i in range(self.parts)]


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """The form in which a record is written: `parts` first, then `value` under the newest record's key. packed: the
    parts' bytes, empty if there are none."""

    value: bytes
    parts: tuple[Put, ...] = ()
    packed: bytes = b""


def stored(
    record: Generation, keys: JobKeys, limits: Limits, addresses: Mapping[str, str] | None = None
) -> StoredRecord:
    """Returns the form in which `record` is written. addresses: of agents' control services, from which keepers are
    taken."""
    if record.world_size <= limits.whole_record_members:
        return StoredRecord(record.encode())
    packed = zlib.compress(record.encode(), level=6)
    digest = hashlib.sha256(packed).digest()
    # numbers of equal length sort as they count, so that old ones can be removed together
    folder = f"{record.number:020d}-{digest.hex()[:16]}"
    chunks = [packed[i : i + PART_BYTES] for i in range(0, len(packed), PART_BYTES)]
    head = pb.Generation(
        protocol=PROTOCOL_VERSION,
        nonce=record.nonce,
        number=record.number,
        base=record.base,
        kind=record.kind.value,
        parts=pb.RecordParts(
            folder=folder,
            count=len(chunks),
            sha256=digest,
            node_count=record.node_count,
            keepers=keepers(record, limits, addresses or {}),
        ),
    )
    parts = tuple(Put(keys.record_part(folder, i), chunk) for i, chunk in enumerate(chunks))
    return StoredRecord(head.SerializeToString(), parts, packed)


def keepers(record: Generation, limits: Limits, addresses: Mapping[str, str]) -> list[str]:
    """Returns the addresses of one node in so many, in the order of ranks, as far as their address is known."""
    agents = list(dict.fromkeys(m.agent_id for m in record.members))
    return [addresses[a] for a in agents[:: limits.nodes_of_a_keeper] if addresses.get(a)]


def head_of(value: bytes) -> Head | None:
    """Returns the head that `value` holds; None for anything else than a head: a whole record, or what no leader
    writes."""
    message = read_message(pb.Generation, value)
    if message is None or not message.HasField("parts"):
        return None
    parts = message.parts
    if not (is_id(parts.folder) and 1 <= parts.count <= MOST_PARTS and len(parts.sha256) == _DIGEST_BYTES):
        return None
    return Head(
        message.number, parts.folder, parts.count, parts.sha256, parts.node_count, tuple(parts.keepers)
    )


def unpacked(head: Head, packed: bytes) -> bytes | None:
    """Returns the whole record's bytes; None if these are not the bytes that the head speaks of."""
    if hashlib.sha256(packed).digest() != head.packed_sha256:
        return None
    unpacker = zlib.decompressobj()
    try:
        value = unpacker.decompress(packed, MOST_RECORD_BYTES)
    except zlib.error:
        return None
    return value if unpacker.eof else None


def joined(parts: Sequence[bytes | None]) -> bytes | None:
    """Joins the parts; None if one is missing."""
    there = [part for part in parts if part is not None]
    return b"".join(there) if len(there) == len(parts) else None
