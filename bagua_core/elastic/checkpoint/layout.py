"""Divides a state for a checkpoint: which tensors only rank 0 writes, and which bytes of the rest each rank writes.

Buffers and registered state are the lead: those of rank 0 count, for it shares its buffers before each forward.
Parameters and optimizers are the body, equal on all ranks of one state name: its run of bytes is striped over the
ranks. A tensor at the edge of a stripe is cut, and its pieces are named `NAME[first:last]`, by elements in row-major
order. Values that are no tensors are in the manifest, which rank 0 writes. Knows no files.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.elastic.checkpoint.part_file import STATE, CorruptPart, Entry
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.flat_tensors import FlatTensors, byte_ranges, bytes_of

_BODY = ("modules", "optimizers", "gradients")
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint16: "U16",
    torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""safetensors' names. Tensors of other types are written as a run of bytes; the manifest says what they are."""


@dataclass(frozen=True, slots=True)
class Stripe:
    """One rank's part of a state: live tensors, to be read before they change."""

    layout_digest: str  # of the body's names, types and shapes; parts of one state agree in it
    manifest: bytes  # empty on all ranks but 0
    pieces: tuple[tuple[Entry, torch.Tensor], ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        count = len(self.manifest)
        lead = (Entry(STATE, "U8", (count,), count, STATE),) if count else ()
        return (*lead, *(entry for entry, _ in self.pieces))

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def manifest_crc(self) -> int:
        return zlib.crc32(self.manifest)

    def read_into(self, out: torch.Tensor) -> None:
        """Fill `out` (uint8, size_bytes long) with the entries' bytes."""
        at = len(self.manifest)
        if at:
            out[:at] = torch.frombuffer(bytearray(self.manifest), dtype=torch.uint8)
        for entry, tensor in self.pieces:
            # contiguous: one tensor at a time is copied where memory is not in row-major order
            piece = _run(tensor.contiguous(), entry)
            out[at : at + entry.size_bytes].copy_(piece)
            at += entry.size_bytes


def stripe(state: dict[str, Any], part: int, parts: int) -> Stripe:
    """state: as StateRegistry.capture gives it, with any plain values beside. Raises StateCodecError."""
    manifest, tensors = state_codec.encode(state, named=True)
    described = state_codec.described_tensors(manifest)
    names = [d["name"] for d in described]
    body = [i for i, name in enumerate(names) if _is_body(name)]
    run = FlatTensors([tensors[i] for i in body])
    spans = [
        (body[i], first, last) for i, first, last in run.spans(*byte_ranges(run.size_bytes, parts, part))
    ]
    if part == 0:
        lead = (i for i, name in enumerate(names) if not _is_body(name))
        spans += [(i, 0, tensors[i].nbytes) for i in lead if tensors[i].nbytes]
    # the widest elements first, so that each tensor begins at a multiple of its element's size
    spans.sort(key=lambda span: -tensors[span[0]].itemsize)
    pieces = tuple((_entry(names[i], tensors[i], first, last), tensors[i]) for i, first, last in spans)
    digest = layout_digest(described)
    return Stripe(digest, b"" if part else manifest + b" " * (-len(manifest) % 8), pieces)


def _is_body(name: str) -> bool:
    words = name.split(".", 3)
    return words[0] in _BODY and words[2:3] != ["buffer"]


def _entry(name: str, tensor: torch.Tensor, first: int, last: int) -> Entry:
    """Of the tensor's bytes from `first` to `last`."""
    dtype = _DTYPES.get(tensor.dtype)
    begin, end = first // tensor.itemsize, last // tensor.itemsize
    is_cut = last - first < tensor.nbytes
    shape = (end - begin,) if is_cut else tuple(tensor.shape)
    shown = f"{name}[{begin}:{end}]" if is_cut else name
    return Entry(shown, dtype or "U8", shape if dtype else (last - first,), last - first, name, begin)


def _run(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The memory of the entry's elements in a contiguous tensor. Raises CorruptPart."""
    first = entry.first * tensor.itemsize
    run = bytes_of(tensor)[first : first + entry.size_bytes]
    if run.numel() != entry.size_bytes:
        raise CorruptPart(f"{entry.name} is not within its tensor")
    return run


def layout_digest(described: Iterable[dict[str, Any]]) -> str:
    """Of the body's tensors among `described`."""
    body = [d for d in described if _is_body(d["name"])]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


class Assembly:
    """Puts a state together from the entries of all its parts. Each tensor is allocated once and owns its memory."""

    def __init__(self, manifest: bytes, entries: Iterable[Entry]) -> None:
        """Raises CorruptPart unless the entries are exactly the state's tensors, StateCodecError."""
        self._manifest = manifest
        self._described = state_codec.described_tensors(manifest)
        if any(not isinstance(d.get("name"), str) for d in self._described):
            raise CorruptPart("its manifest names no tensors")
        self.layout_digest = layout_digest(self._described)
        self._require_whole(entries)
        self._tensors = state_codec.allocate(manifest, row_major=True)
        self._places = {d["name"]: i for i, d in enumerate(self._described)}

    def _require_whole(self, entries: Iterable[Entry]) -> None:
        runs = defaultdict(list)
        for entry in entries:
            runs[entry.tensor].append(entry)
        runs.pop(STATE, None)
        for d in self._described:
            itemsize = state_codec.dtype_of(d["dtype"]).itemsize
            at = 0
            for entry in sorted(runs.pop(d["name"], ()), key=lambda e: e.first):
                if entry.first * itemsize != at:
                    break
                at += entry.size_bytes
            if at != math.prod(d["shape"]) * itemsize:
                raise CorruptPart(f"{d['name']} is not whole in its parts")
        if runs:
            raise CorruptPart(f"{next(iter(runs))} is none of its tensors")

    def target(self, entry: Entry) -> torch.Tensor:
        """Where the entry's bytes go. Raises CorruptPart."""
        if entry.tensor == STATE:
            return torch.empty(entry.size_bytes, dtype=torch.uint8)
        place = self._places.get(entry.tensor)
        if place is None:
            raise CorruptPart(f"{entry.tensor} is none of its tensors")
        return _run(self._tensors[place], entry)

    def state(self) -> dict[str, Any]:
        """The state that `stripe` was given. Raises StateCodecError."""
        tensors = list(self._tensors)
        del self._tensors
        for i, d in enumerate(self._described):
            if list(tensors[i].stride()) != d["stride"]:
                strided = torch.empty_strided(d["shape"], d["stride"], dtype=tensors[i].dtype)
                tensors[i] = strided.copy_(tensors[i])
        state: dict[str, Any] = state_codec.decode(self._manifest, tensors)
        return state
