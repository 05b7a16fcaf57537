"""Puts a state together from the parts of a checkpoint: whole tensors, or of each tensor what one worker holds.

Each tensor is allocated once and owns its memory. A run of a part's bytes goes straight to its place where it is one
run there too, as with tensors that are divided by rows. Otherwise it is read into memory of its own first. Parts that
have nothing for this worker are not opened. catalogue.py decides which parts make a checkpoint.
"""

from __future__ import annotations

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from bagua_core.elastic.checkpoint.boxes import Box, boxes_of_run, rows_in_common
from bagua_core.elastic.checkpoint.layout import layout_digest
from bagua_core.elastic.checkpoint.part_file import STATE, CorruptPart, Entry, Header
from bagua_core.elastic.checkpoint.placement_index import Placed
from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.flat_tensors import bytes_of, strides_are_dense
from bagua_core.errors import UserError
from bagua_core.model.sharded_tensors import Layout, local_box

Wanted: TypeAlias = Callable[[str, tuple[int, ...]], Layout | None]
"""By the name and the global shape of a tensor: how it is sharded on this worker; None if it is whole here."""


def whole_tensors(name: str, shape: tuple[int, ...]) -> Layout | None:
    """Returns None for each tensor: the Wanted of a reader that has no shards."""
    return None


class OtherShards(UserError, ValueError):
    """The checkpoint has tensors of its shards' own, and the reader is none of so many shards."""


@dataclass(frozen=True, slots=True)
class Reader:
    """The worker that reads a checkpoint.

    shard, shards: which of a replica's workers it is. shards 0: the reader belongs to no job, so tensors that each
    shard has its own of are left out (empty), and named tuples come as plain ones.
    """

    wanted: Wanted = whole_tensors
    shard: int = 0
    shards: int = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of elements of a part, read into memory of its own."""

    entry: Entry
    box: Box  # of which the run is
    memory: torch.Tensor


class _Tensor:
    """One tensor of the state: what the manifest says, and what of it is wanted."""

    def __init__(self, described: dict[str, Any], wanted: Wanted) -> None:
        """Reads what the manifest says of the tensor, and finds what of it is wanted. Raises StateCodecError,
        ValueError."""
        self.name: str = described["name"]
        self.itemsize = state_codec.dtype_of(described["dtype"]).itemsize
        source = Layout.from_json(described["sharded"]) if "sharded" in described else None
        self.is_sharded_there = source is not None
        self.shape = tuple(described["shape"]) if source is None else source.shape
        layout = wanted(self.name, self.shape)
        self.box = Box.whole(self.shape)
        if layout is not None:
            self.box = Box(*local_box(self.shape, layout.placements, layout.mesh_shape, layout.coordinate))
        self.described = self._as_wanted(described, source, layout)

    def _as_wanted(
        self, described: dict[str, Any], source: Layout | None, layout: Layout | None
    ) -> dict[str, Any]:
        """Returns what the manifest would say if this worker had written it."""
        if layout is not None:
            sharded = {"sharded": layout.to_json()}
            return {**_plain(described), **_dense(self.box.size), **sharded}
        if source is None:
            return described
        is_dense = strides_are_dense(source.shape, source.stride)
        return {
            **_plain(described),
            **_dense(source.shape),
            **({"stride": list(source.stride)} if is_dense else {}),
        }


def _plain(described: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key != "sharded"}


def _dense(shape: tuple[int, ...]) -> dict[str, Any]:
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return {"shape": list(shape), "stride": strides}


class Assembly:
    """Puts one state together. Threads may read different parts at the same time."""

    def __init__(self, manifest: bytes, headers: Sequence[Header], reader: Reader | None = None) -> None:
        """Allocates the state's memory. headers: those of all parts of a complete checkpoint.

        Raises CorruptPart unless their entries are exactly the state's tensors, OtherShards, StateCodecError,
        ValueError.
        """
        reader = reader or Reader()
        described = state_codec.described_tensors(manifest)
        if any(not isinstance(d.get("name"), str) for d in described):
            raise CorruptPart("its manifest names no tensors")
        own = _owned_by_shards(headers, {d["name"] for d in described})
        shards = headers[0].shards
        if own and reader.shards not in (0, shards):
            raise OtherShards(
                f"each of the {shards} shards that wrote the checkpoint has its own {min(own)}, which can't be divided "
                f"among {reader.shards}; start with --replica-size {shards}"
            )
        self._of_a_job = reader.shards > 0
        self.layout_digest = layout_digest(described, own)
        self._tensors = [
            _Tensor(_of_shard(d, headers, reader) if d["name"] in own else d, reader.wanted)
            for d in described
        ]
        self._headers = {header.part: header for header in headers}
        self._require_whole(headers, {f"{name}@{shard}" for name in own for shard in range(shards)} | own)
        self._manifest = manifest
        if any(t.described is not d for t, d in zip(self._tensors, described, strict=True)):
            parsed = json.loads(manifest)
            parsed["tensors"] = [t.described for t in self._tensors]
            self._manifest = json.dumps(parsed).encode()
        self._memory = list(state_codec.allocate(self._manifest, row_major=True))
        self._places = {tensor.name: i for i, tensor in enumerate(self._tensors)}
        self._pieces: list[_Piece] = []
        self._lock = threading.Lock()

    def _require_whole(self, headers: Sequence[Header], of_shards: Set[str]) -> None:
        """Checks that the parts hold exactly the state's tensors. Raises CorruptPart otherwise.

        of_shards: names of the tensors that each shard has its own of; those of others are not read here.
        """
        runs: dict[str, list[Entry]] = defaultdict(list)
        boxes: dict[str, dict[int, Placed]] = defaultdict(dict)
        for header in headers:
            for entry in header.entries:
                runs[entry.tensor].append(entry)
            for name, placed in header.placed.items():
                boxes[name][header.shard] = placed
        runs.pop(STATE, None)
        for tensor in self._tensors:
            own, places = runs.pop(tensor.name, []), boxes.pop(tensor.name, {})
            if tensor.name in of_shards:
                continue  # its index says that it is whole, and nothing else knows its shape
            if bool(places) != (tensor.is_sharded_there and math.prod(tensor.shape) > 0):
                raise CorruptPart(
                    f"{tensor.name} is sharded in its index or in its manifest, and not in both"
                )
            if any((p.shape, p.itemsize) != (tensor.shape, tensor.itemsize) for p in places.values()):
                raise CorruptPart(f"{tensor.name} has another shape in its index than in its manifest")
            if not places and not _is_whole(own, tensor):
                raise CorruptPart(f"{tensor.name} is not whole in its parts")
            if sum(entry.size_bytes for entry in own) != math.prod(tensor.shape) * tensor.itemsize:
                raise CorruptPart(f"{tensor.name} is not whole in its parts")
        strange = (runs.keys() | boxes.keys()) - of_shards
        if strange:
            raise CorruptPart(f"{min(strange)} is none of its tensors")

    # -- reading

    def needs(self, header: Header) -> bool:
        """Tells whether the part has bytes that are wanted here."""
        return any(
            not target.is_meta and target.numel()
            for entry in header.entries
            for target in self._targets(header, entry, None)
        )

    def targets(self, header: Header) -> list[torch.Tensor]:
        """Returns the memory to which the part's bytes go: see part_file.read_data. Raises CorruptPart."""
        known = self._headers.get(header.part)
        if known is None or (known.entries, known.placed) != (header.entries, header.placed):
            raise CorruptPart("it was replaced by another part while it was read")
        pieces: list[_Piece] = []
        found = [target for entry in header.entries for target in self._targets(header, entry, pieces)]
        with self._lock:
            self._pieces += pieces
        return found

    def _targets(self, header: Header, entry: Entry, pieces: list[_Piece] | None) -> Iterator[torch.Tensor]:
        """Yields the memory to which the entry's bytes go.

        pieces: gets those that are to be spread when they are read; None: nothing is read, and no memory taken.
        """
        if entry.tensor == STATE:
            yield _dropped(entry.size_bytes)
            return
        if entry.tensor not in self._places:  # another shard's own
            yield _dropped(entry.size_bytes)
            return
        tensor = self._tensors[self._places[entry.tensor]]
        placed = header.placed.get(entry.tensor)
        box = Box.whole(tensor.shape) if placed is None else placed.box
        first = entry.first
        last = first + entry.size_bytes // tensor.itemsize
        rows = rows_in_common(box, tensor.box)
        if rows is None:
            if not any(part.common(tensor.box) for _, part in boxes_of_run(box, first, last)):
                yield _dropped(entry.size_bytes)
                return
            memory = torch.empty(
                entry.size_bytes if pieces is not None else 1, dtype=torch.uint8, device="cpu"
            )
            if pieces is not None:
                pieces.append(_Piece(entry, box, memory))
            yield memory
            return
        begin, end = max(first, rows[0]), min(last, rows[1])
        if begin >= end:
            yield _dropped(entry.size_bytes)
            return
        at = (rows[2] + begin - rows[0]) * tensor.itemsize
        run = bytes_of(self._memory[self._places[entry.tensor]])[at : at + (end - begin) * tensor.itemsize]
        if run.numel() != (end - begin) * tensor.itemsize:
            raise CorruptPart(f"{entry.name} is not within its tensor")
        yield _dropped((begin - first) * tensor.itemsize)
        yield run
        yield _dropped((last - end) * tensor.itemsize)

    def state(self) -> dict[str, Any]:
        """Returns the state, when all parts that are needed were read. Raises StateCodecError."""
        for piece in self._pieces:
            self._spread(piece)
        self._pieces = []
        tensors = list(self._memory)
        del self._memory
        for i, tensor in enumerate(self._tensors):
            d = tensor.described
            if list(tensors[i].stride()) != d["stride"]:
                strided = torch.empty_strided(d["shape"], d["stride"], dtype=tensors[i].dtype, device="cpu")
                tensors[i] = strided.copy_(tensors[i])
        state: dict[str, Any] = state_codec.decode(self._manifest, tensors, plain_tuples=not self._of_a_job)
        return state

    def _spread(self, piece: _Piece) -> None:
        place = self._places[piece.entry.tensor]
        tensor, memory = self._tensors[place], self._memory[place]
        first = piece.entry.first
        last = first + piece.entry.size_bytes // tensor.itemsize
        values = piece.memory.view(memory.dtype)
        for at, box in boxes_of_run(piece.box, first, last):
            common = box.common(tensor.box)
            if common is not None:
                source = values[at - first : at - first + box.count].view(box.size)
                memory[common.slices_in(tensor.box)] = source[common.slices_in(box)]


def _owned_by_shards(headers: Sequence[Header], names: Set[str]) -> frozenset[str]:
    """Returns the tensors among `names` that each shard has its own of, by the index of the first shard."""
    placed = {name for header in headers if header.shard == 0 for name in header.placed}
    return frozenset(name for name in names if f"{name}@0" in placed and f"{name}@0" not in names)


def _of_shard(described: dict[str, Any], headers: Sequence[Header], reader: Reader) -> dict[str, Any]:
    """Returns what the reader's shard would say of a tensor of its own. Raises CorruptPart."""
    name = f"{described['name']}@{reader.shard}"
    places = [header.placed[name] for header in headers if name in header.placed]
    if not places:
        raise CorruptPart(f"no part has {name}")
    if places[0].itemsize != state_codec.dtype_of(described["dtype"]).itemsize:
        raise CorruptPart(f"{name} is of another type in its index than in its manifest")
    if not reader.shards:
        return {**described, **_dense((0,))}
    return {**described, **_dense(places[0].shape), "name": name}


def _is_whole(entries: Sequence[Entry], tensor: _Tensor) -> bool:
    at = 0
    for entry in sorted(entries, key=lambda e: e.first):
        if entry.first * tensor.itemsize != at:
            return False
        at += entry.size_bytes
    return at == math.prod(tensor.shape) * tensor.itemsize


def _dropped(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device="meta")
