"""Writes and reads the file of one rank's part of a checkpoint, so that an incomplete file never counts.

A part is a safetensors file, which other programs read: the length of a JSON header, the header, the tensors' bytes.
What bagua adds is in the header's `__metadata__`. A storage (storage.py) shows a part whole or not at all; its length
and its digests show what a disk or a store did to it. catalogue.py decides which parts make a checkpoint.

The safetensors library is not used: it neither syncs nor reads into memory that is there, and it maps the file, so a
failing disk would end the worker by SIGBUS where `read` raises OSError.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from bagua_contract.records import StateName
from bagua_core.communication import traffic
from bagua_core.elastic.checkpoint.placement_index import Placed
from bagua_core.elastic.checkpoint.storage import Storage
from bagua_core.elastic.state.flat_digest import digest_of_bytes
from bagua_core.errors import PeerViolation

FORMAT = 2
SUFFIX = ".safetensors"  # parts of format 1 had none
STATE = "bagua.state"
"""The tensor, the first of part 0, that holds the state's manifest as JSON text (state_codec.py)."""

_LENGTH = struct.Struct("<Q")
_CHECKED = b'{"__metadata__":{"checksum":"'  # then the checksum of all header bytes behind it
_CHUNK_BYTES = 16 << 20
_MOST_HEADER_BYTES = 64 << 20
_MOST = 1 << 63


class CorruptPart(PeerViolation):
    """The file is not a whole part. The message says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the file: a whole tensor of the state, or a run of elements of one that is cut, or of what a shard
    holds of one."""

    name: str
    dtype: str  # in safetensors' words
    shape: tuple[int, ...]
    size_bytes: int
    tensor: str  # the tensor's name in the state
    first: int = 0  # element of the tensor (of a sharded one: of its box), in row-major order

    def has_odd_values(self) -> bool:
        numbers = (*self.shape, self.size_bytes, self.first)
        return not (
            isinstance(self.dtype, str)
            and isinstance(self.tensor, str)
            and all(type(number) is int and 0 <= number < _MOST for number in numbers)
        )


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about a part but its bytes."""

    run: int  # which start of the job on this directory, from 1
    job: str  # its nonce
    name: StateName
    part: int
    parts: int  # how many ranks wrote one
    layout_digest: str  # of the tensors that are divided over the ranks
    manifest_crc: int  # of the bytes of STATE; 0 in all parts but 0
    digest: int  # of the part's bytes
    position: Mapping[str, int]
    fingerprint: Mapping[str, str]  # of the script
    entries: tuple[Entry, ...]  # in the order of their bytes
    shard: int = 0  # whose tensors these are; part p is of shard p modulo shards
    shards: int = 1  # workers of a replica
    replica: str = ""  # whose shards these are, where replicas' states differ; empty: all have the same state
    # Of the sharded tensors of the entries, by name
    placed: Mapping[str, Placed] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def whole(self) -> tuple[object, ...]:
        """The values that all parts of one checkpoint have alike. The position is not among them: it follows from the
        name."""
        return (
            self.run,
            self.job,
            self.name,
            self.parts,
            self.layout_digest,
            self.fingerprint,
            self.shards,
            self.replica,
        )

    @property
    def file_name(self) -> str:
        return file_name(self.part, self.parts, self.replica)

    def encode(self) -> bytes:
        """Returns the beginning of the file, up to the tensors' bytes."""
        absent = {"entries", "placed", *(() if self.shards > 1 else ("shard", "shards"))}
        absent |= set() if self.replica else {"replica"}
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in absent}
        if self.placed:
            values["placed"] = {name: placed.to_json() for name, placed in self.placed.items()}
        values["name"] = [self.name.generation, self.name.step, self.name.operations]
        values["pieces"] = {e.name: [e.tensor, e.first] for e in self.entries if e.name != e.tensor}
        table: dict[str, Any] = {
            "__metadata__": {"checksum": "", "bagua": _json({"format": FORMAT, **values})}
        }
        at = 0
        for e in self.entries:
            table[e.name] = {"dtype": e.dtype, "shape": e.shape, "data_offsets": [at, at + e.size_bytes]}
            at += e.size_bytes
        return with_checksum(_json(table).encode())

    @staticmethod
    def decode(text: bytes) -> Header:
        """Reads the header from its JSON text. Raises CorruptPart, also for values that no part can have."""
        try:
            table = json.loads(text)
            values = json.loads(table.pop("__metadata__")["bagua"])
            if values["format"] != FORMAT:
                raise CorruptPart(f"it is of format {values['format']!r}, this version reads {FORMAT}")
            values["name"] = StateName(*values["name"])
            values["entries"] = tuple(_entries(table, values["pieces"]))
            values = {"shard": 0, "shards": 1, "replica": "", "placed": {}, **values}
            values["placed"] = {n: Placed.from_json(placed) for n, placed in values["placed"].items()}
            header = Header(**{f.name: values[f.name] for f in fields(Header)})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptPart(f"its header is unreadable: {error!r}") from error
        if odd := header.odd_values():
            raise CorruptPart(f"its header is unreadable: {odd}")
        return header

    def odd_values(self) -> str:
        """Returns the first value that no part can have, in words; empty if there is none."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.type == "int"}
        numbers |= {f"name.{f.name}": getattr(self.name, f.name) for f in fields(self.name)}
        for name, value in numbers.items():
            if type(value) is not int or (name != "digest" and not 0 <= value < _MOST):
                return f"{name} is {reprlib.repr(value)}"
        texts = (self.job, self.layout_digest, self.replica)
        maps = (self.position, self.fingerprint)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(m, dict) for m in maps):
            return "a text or a table is none"
        if not self.part < self.parts:
            return f"it is part {self.part} of {self.parts}"
        if not self.shard < self.shards:
            return f"it is of shard {self.shard} of {self.shards}"
        return ""


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def with_checksum(text: bytes) -> bytes:
    """Returns the beginning of a file whose header is `text`, which has an empty checksum."""
    rest = text[len(_CHECKED) :]
    rest += b" " * (-(len(_CHECKED) + 8 + len(rest)) % 8)  # tensors begin at a multiple of 8
    text = _CHECKED + b"%08x" % zlib.crc32(rest) + rest
    return _LENGTH.pack(len(text)) + text


def _entries(table: dict[str, Any], pieces: dict[str, Any]) -> Iterator[Entry]:
    """Yields the entries of a header's table. Raises CorruptPart, KeyError, TypeError, ValueError."""
    at = 0
    for name, described in table.items():
        begin, end = described["data_offsets"]
        tensor, first = pieces.get(name, (name, 0))
        entry = Entry(name, described["dtype"], tuple(described["shape"]), end - begin, tensor, first)
        if begin != at or entry.has_odd_values():
            raise CorruptPart(f"its header is unreadable: the entry {reprlib.repr(name)}")
        at = end
        yield entry


def file_name(part: int, parts: int, replica: str = "") -> str:
    """Returns the name of a part's file. replica: see Header. Replicas that differ may each write all shards of the
    same step, and none may replace a part of another one."""
    own = f"-{hashlib.sha256(replica.encode()).hexdigest()[:16]}" if replica else ""
    return f"part-{part:05d}-of-{parts:05d}{own}{SUFFIX}"


def write(
    storage: Storage, directory: str, header: Header, data: torch.Tensor, at_edge: Callable[[str], None]
) -> None:
    """Puts the part into `directory`. data: uint8, on the CPU. Raises OSError."""
    view = data.numpy().data
    half = len(view) // 2
    name = f"{directory}/{header.file_name}"
    storage.write(name, (header.encode(), view[:half], view[half:]), at_edge)


def read_header(storage: Storage, name: str) -> Header:
    """Reads the header, and checks that the file is as long as it says. Raises CorruptPart, OSError."""
    with storage.open(name) as file:
        header = _read_header(file)
        expected = file.tell() + header.data_bytes
        size_bytes = file.seek(0, os.SEEK_END)
    if size_bytes != expected:
        raise CorruptPart(f"it has {size_bytes} bytes instead of {expected}")
    return header


def read_manifest(storage: Storage, name: str) -> bytes:
    """Reads the bytes of STATE, from part 0. Raises CorruptPart, OSError."""
    with storage.open(name) as file:
        header = _read_header(file)
        if not header.entries or header.entries[0].name != STATE:
            raise CorruptPart("it has no manifest")
        manifest: bytes = file.read(header.entries[0].size_bytes)
    if zlib.crc32(manifest) != header.manifest_crc:
        raise CorruptPart("its manifest has another checksum")
    return manifest


def read_data(storage: Storage, name: str, targets_of: Callable[[Header], Sequence[torch.Tensor]]) -> None:
    """Reads the part's bytes into the targets, runs of uint8 on the CPU that are together as long as these bytes.

    What goes to a target on the device "meta" is dropped. Raises CorruptPart when the bytes are not those that were
    written, OSError, and what `targets_of` raises.
    """
    with storage.open(name) as file:
        header = _read_header(file)
        targets = iter(targets_of(header))
        if digest_of_bytes(_copied(_chunks(file, header.data_bytes), targets)) != header.digest:
            raise CorruptPart("its bytes have another digest")


def verify(storage: Storage, name: str) -> None:
    """Reads the part and compares its digest. Raises CorruptPart, OSError."""
    read_data(storage, name, lambda h: [torch.empty(h.data_bytes, dtype=torch.uint8, device="meta")])


def read_ranges(storage: Storage, name: str, ranges: Iterable[tuple[int, int]]) -> Iterator[torch.Tensor]:
    """Yields the bytes of each range behind the header, in their order. Raises CorruptPart, OSError."""
    with storage.open(name) as file:
        _read_header(file)
        start = file.tell()
        for begin, end in ranges:
            file.seek(start + begin)
            raw = bytearray(file.read(end - begin))
            if len(raw) != end - begin:
                raise CorruptPart(f"{name}: it ends early")
            yield (
                torch.frombuffer(raw, dtype=torch.uint8)
                if raw
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )


def digest(data: torch.Tensor) -> int:
    """Returns the digest of a part's bytes, as `read_data` checks it."""
    return digest_of_bytes(data[at : at + _CHUNK_BYTES] for at in range(0, data.numel(), _CHUNK_BYTES))


def _chunks(file: Any, size_bytes: int) -> Iterator[torch.Tensor]:
    """Yields the next bytes of the file, in one buffer that is used again."""
    buffer = torch.empty(min(size_bytes, _CHUNK_BYTES), dtype=torch.uint8, device="cpu")
    for begin in range(0, size_bytes, _CHUNK_BYTES):
        chunk = buffer[: size_bytes - begin]
        view = chunk.numpy().data
        while view:
            count = file.readinto(view)
            if not count:
                raise CorruptPart("it ends early")
            traffic.state_arrived.add(count)
            view = view[count:]
        yield chunk


def _copied(chunks: Iterator[torch.Tensor], targets: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the chunks, each copied into the targets, which together are as long as the chunks."""
    target = torch.empty(0, dtype=torch.uint8, device="cpu")
    for chunk in chunks:
        left = chunk
        while left.numel():
            while not target.numel():
                target = next(targets)
            count = min(target.numel(), left.numel())
            if not target.is_meta:
                target[:count] = left[:count]
            target, left = target[count:], left[count:]
        yield chunk


def _read_header(file: Any) -> Header:
    """Reads the header; the file is then positioned after it."""
    start = file.read(_LENGTH.size)
    size_bytes = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else 0
    text = file.read(size_bytes) if size_bytes <= _MOST_HEADER_BYTES else b""
    begin, rest = text[: len(_CHECKED) + 8], text[len(_CHECKED) + 8 :]
    if not text.startswith(_CHECKED) or len(text) != size_bytes:
        raise CorruptPart("it is not a checkpoint's part")
    if begin[len(_CHECKED) :] != b"%08x" % zlib.crc32(rest):
        raise CorruptPart("its header has another checksum")
    return Header.decode(text)
