"""Divides a state for a checkpoint: which tensors only rank 0 writes, and which bytes of the rest each rank writes.

Buffers and registered state are the lead: those of rank 0 count, for it shares its buffers before each forward.
Parameters and optimizers are the body, equal on all ranks of one state name: its run of bytes is striped over the
ranks. A tensor at the edge of a stripe is cut, and its pieces are named `NAME[first:last]`, by elements in row-major
order. Values that are no tensors are in the manifest, which rank 0 writes. Knows no files.

Where the model is sharded, ranks are those of the workers with one shard, and each shard's body is striped over its
own. It has what the shard holds of sharded tensors, named `NAME@shard`; plain tensors are of shard 0. A few plain ones
belong to each shard (`owned_by_shards`). assembly.py reads.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.elastic.checkpoint.boxes import Box
from bagua_core.elastic.checkpoint.part_file import STATE, CorruptPart, Entry
from bagua_core.elastic.checkpoint.placement_index import Placed
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.flat_tensors import FlatTensors, byte_ranges, bytes_of, digest
from bagua_core.model.sharded_tensors import Layout

NAMES = "parameter_names"
"""The key in a saved state of each optimizer's parameters' names, by their numbers in its state."""
OTHER_NAMES = "other_names"
"""The key in a saved state of each model's ModelTensors.other_names; absent where there are none."""
_BODY = ("modules", "optimizers", "gradients")
_STATE_OF_OPTIMIZER = re.compile(r"optimizers\.(\d+)\.state\.(\d+)\.")
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

    layout_digest: str  # of the body's names, types and global shapes; parts of one state agree in it
    manifest: bytes  # empty on all ranks but 0 of shard 0
    pieces: tuple[tuple[Entry, torch.Tensor], ...]
    placed: Mapping[str, Placed]  # of the sharded tensors among the pieces

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
        """Fills `out` (uint8, size_bytes long) with the entries' bytes."""
        at = len(self.manifest)
        if at:
            out[:at] = torch.frombuffer(bytearray(self.manifest), dtype=torch.uint8)
        for entry, tensor in self.pieces:
            # contiguous: one tensor at a time is copied where memory is not in row-major order
            piece = run_of(tensor.contiguous(), entry)
            out[at : at + entry.size_bytes].copy_(piece)
            at += entry.size_bytes


def stripe(state: dict[str, Any], part: int, parts: int, shard: int = 0, shards: int = 1) -> Stripe:
    """Returns the part of a state that one worker writes.

    state: as StateRegistry.capture gives it, with any plain values beside. part, parts: of those that hold `shard`.
    shards: of a replica. Raises StateCodecError.
    """
    listed = _Listed(state, shard, shards)
    manifest, tensors, described, layouts = listed.manifest, listed.tensors, listed.described, listed.layouts
    by_shard, own, body = listed.by_shard, listed.own, listed.body
    names = [f"{d['name']}@{shard}" if d["name"] in by_shard else d["name"] for d in described]
    run = FlatTensors([tensors[i] for i in body])
    spans = [
        (body[i], first, last) for i, first, last in run.spans(*byte_ranges(run.size_bytes, parts, part))
    ]
    if part == 0:
        lead = (i for i in own if not _is_body(names[i]))
        spans += [(i, 0, tensors[i].nbytes) for i in lead if tensors[i].nbytes]
    # the widest elements first, so that each tensor begins at a multiple of its element's size
    spans.sort(key=lambda span: -tensors[span[0]].itemsize)
    shown = {i: f"{names[i]}@{shard}" for i in layouts}
    pieces = tuple(
        (_entry(names[i], shown.get(i, names[i]), tensors[i], first, last), tensors[i])
        for i, first, last in spans
    )
    placed = {
        names[i]: Placed(
            layouts[i].shape, Box(layouts[i].offset, tuple(tensors[i].shape)), tensors[i].itemsize
        )
        for i, _, _ in spans
        if i in layouts
    }
    placed |= {
        names[i]: Placed(tuple(tensors[i].shape), Box.whole(tensors[i].shape), tensors[i].itemsize)
        for i, d in enumerate(described)
        if d["name"] in by_shard
    }
    is_lead = part == 0 and shard == 0
    text = manifest + b" " * (-len(manifest) % 8) if is_lead else b""
    return Stripe(layout_digest(described, by_shard), text, pieces, placed)


def digests(state: dict[str, Any], shard: int = 0, shards: int = 1) -> tuple[int, int]:
    """Returns digests of the body of a state, of its layout and of its values; both fit an int64.

    Workers that hold one state of one shard agree in both. The values of gradients are not among them: those that are
    not reduced yet, as under no_sync(), are each worker's own. Arguments and errors as of `stripe`.
    """
    listed = _Listed(state, shard, shards)
    layout = int(layout_digest(listed.described, listed.by_shard), 16) >> 1
    compared = (i for i in listed.body if not listed.described[i]["name"].startswith("gradients."))
    return layout, digest([listed.tensors[i] for i in compared])


class _Listed:
    """A state's tensors, and the indices of those that the workers with `shard` write: `own`, and `body` among them."""

    def __init__(self, state: dict[str, Any], shard: int, shards: int) -> None:
        self.manifest, self.tensors = state_codec.encode(state, named=True)
        self.described = state_codec.described_tensors(self.manifest)
        self.by_shard = (
            owned_by_shards(self.described, state.get(NAMES, [])) if shards > 1 else frozenset[str]()
        )
        self.layouts = {
            i: Layout.from_json(d["sharded"]) for i, d in enumerate(self.described) if "sharded" in d
        }
        self.own = [
            i
            for i, d in enumerate(self.described)
            if (
                self.layouts[i].is_written_here
                if i in self.layouts
                else shard == 0 or d["name"] in self.by_shard
            )
        ]
        self.body = [i for i in self.own if _is_body(self.described[i]["name"])]


def owned_by_shards(described: Iterable[dict[str, Any]], names: Any) -> frozenset[str]:
    """Returns the names of the plain tensors that each shard has its own of.

    They are an algorithm's, and what an optimizer keeps for a sharded parameter in another form than the parameter's,
    but for single numbers. They can't be divided among other shards. names: of each optimizer's parameters, by its
    number.
    """
    described = list(described)
    sharded = {d["name"] for d in described if "sharded" in d}
    found = []
    for d in described:
        name = d["name"]
        match = _STATE_OF_OPTIMIZER.match(name)
        if name in sharded:
            continue
        if name.split(".", 3)[2:3] == ["algorithm"]:
            found.append(name)
        elif match and d["shape"]:  # not by the number of values, which differs between shards
            parameter = names[int(match[1])][int(match[2])] if names else None
            if parameter is None or not _names_of(parameter).isdisjoint(sharded):
                found.append(name)
    return frozenset(found)


def _names_of(parameter: str) -> set[str]:
    """Returns what a parameter of this name may be called among the described tensors.

    See StateRegistry.parameter_names.
    """
    number, _, own = parameter.partition(".")
    return {f"modules.0.parameter.{parameter}", f"modules.{number}.parameter.{own}"}


def _is_body(name: str) -> bool:
    words = name.split(".", 3)
    return words[0] in _BODY and words[2:3] != ["buffer"]


def _entry(name: str, shown: str, tensor: torch.Tensor, first: int, last: int) -> Entry:
    """Returns the entry of the tensor's bytes from `first` to `last`. shown: the entry's name if it is not cut."""
    dtype = _DTYPES.get(tensor.dtype)
    begin, end = first // tensor.itemsize, last // tensor.itemsize
    is_cut = last - first < tensor.nbytes
    shape = (end - begin,) if is_cut else tuple(tensor.shape)
    shown = f"{shown}[{begin}:{end}]" if is_cut else shown
    return Entry(shown, dtype or "U8", shape if dtype else (last - first,), last - first, name, begin)


def run_of(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Returns the memory of the entry's elements in a contiguous tensor. Raises CorruptPart."""
    first = entry.first * tensor.itemsize
    run = bytes_of(tensor)[first : first + entry.size_bytes]
    if run.numel() != entry.size_bytes:
        raise CorruptPart(f"{entry.name} is not within its tensor")
    return run


def layout_digest(described: Iterable[dict[str, Any]], by_shard: Collection[str] = ()) -> str:
    """Returns a digest of the body's tensors among `described`, the same on all shards.

    by_shard: see owned_by_shards.
    """
    body = [_on_all_shards(d, d["name"] in by_shard) for d in described if _is_body(d["name"])]
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def _on_all_shards(described: dict[str, Any], is_each_shards: bool) -> dict[str, Any]:
    if is_each_shards:
        return {key: described[key] for key in ("dtype", "device", "name")}
    if "sharded" not in described:
        return described
    layout = Layout.from_json(described["sharded"])
    return {
        **{key: described[key] for key in ("dtype", "device", "name")},
        "sharded": [layout.shape, layout.placements, layout.mesh_shape, layout.mesh_names],
    }
