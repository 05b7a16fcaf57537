"""Lets torch.distributed.checkpoint read a checkpoint of ours: `dcp.load(state_dict, storage_reader=DcpReader(...))`.

Names are those of torch's `get_state_dict`: `model.NAME`, `optimizer.state.NAME.KEY`,
`optimizer.param_groups.NUMBER.KEY`; a second model is `model_1`, its optimizer `optimizer_1`. Each rank of the reader
reads what it has of each tensor, from the boxes that the parts have. Parts are verified by their digests, each rank
those that it reads from.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from bagua_core.elastic.checkpoint import catalogue, part_file
from bagua_core.elastic.checkpoint.boxes import Box, boxes_of_run
from bagua_core.elastic.checkpoint.catalogue import Found
from bagua_core.elastic.checkpoint.layout import NAMES, OTHER_NAMES
from bagua_core.elastic.checkpoint.part_file import STATE, Entry, Header
from bagua_core.elastic.checkpoint.storage import Storage
from bagua_core.elastic.state import state_codec
from bagua_core.errors import UserError
from bagua_core.model.sharded_tensors import Layout, LocalPart

_TENSOR_OF_MODEL = re.compile(r"modules\.(\d+)\.(?:parameter|buffer)\.(.+)")
_STATE_OF_OPTIMIZER = re.compile(r"optimizers\.(\d+)\.state\.(\d+)\.(.+)")


class NothingToRead(UserError, ValueError):
    """The directory has no complete checkpoint, or not the one that was asked for. The message lists what is there."""


@dataclass(frozen=True, slots=True)
class _Run:
    """The place of a chunk's elements: bytes of a part behind its header."""

    part: str
    begin: int
    size: tuple[int, ...]
    dtype: torch.dtype


class DcpReader(StorageReader):
    """Reads the newest complete checkpoint in `storage`, or that of `step`.

    Raises NothingToRead, CorruptPart, OSError when torch.distributed.checkpoint calls it.
    """

    def __init__(self, storage: Storage, step: int | None = None) -> None:
        super().__init__()
        self._storage = storage
        self._step = step
        self._runs: Mapping[tuple[str, tuple[int, ...]], _Run] = {}
        self._values: Mapping[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a directory alone does not say which checkpoint of it is meant

    # -- on the coordinator

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found = self._chosen()
        directory = found.place.directory_name
        parts = [f"{directory}/{h.file_name}" for h in found.headers]
        manifest = part_file.read_manifest(self._storage, parts[0])
        described = {d["name"]: d for d in state_codec.described_tensors(manifest)}
        values, paths = _values_of(manifest)
        names, others = values.get(NAMES, []), _other_names(values.get(OTHER_NAMES, []))
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        runs: dict[tuple[str, tuple[int, ...]], _Run] = {}
        for part, header in zip(parts, found.headers, strict=True):
            for begin, entry in _placed_entries(header):
                shown = _shown_names(paths.get(entry.tensor, ()), names)
                if not shown:
                    continue
                for run, box in _chunks_of(header, entry, begin, part, described[entry.tensor]):
                    for name in shown:
                        runs[name, box.offset] = run
                        chunks.setdefault(name, []).append(
                            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
                        )
        tensors: dict[str, Any] = {}
        for tensor, d in described.items():
            for name in _shown_names(paths.get(tensor, ()), names):
                shape = Layout.from_json(d["sharded"]).shape if "sharded" in d else d["shape"]
                if name not in chunks and torch.Size(shape).numel():
                    # Each shard has its own, in a form that can't be divided. Torch names a missing key, and would
                    # leave a tensor without chunks unread.
                    continue
                tensors[name] = TensorStorageMetadata(
                    TensorProperties(dtype=state_codec.dtype_of(d["dtype"])),
                    torch.Size(shape),
                    chunks.get(name, []),
                )
        plain = dict(_plain_values(values, names))
        for name, first in others.items():
            if first in tensors:
                tensors[name] = tensors[first]
                runs |= {(name, offset): run for (of, offset), run in runs.items() if of == first}
        metadata: dict[str, Any] = {**tensors, **{name: BytesStorageMetadata() for name in plain}}
        return Metadata(metadata, storage_data=(runs, plain))

    def _chosen(self) -> Found:
        found = catalogue.find(self._storage)
        chosen = catalogue.newest_complete(f for f in found if self._step in (None, f.place.name.step))
        if chosen is not None:
            return chosen
        there = ", ".join(
            f"step {f.place.name.step} ({'complete' if f.is_complete else f.reason})" for f in found
        )
        wanted = "" if self._step is None else f" of step {self._step}"
        raise NothingToRead(
            f"{self._storage} has no complete checkpoint{wanted}; there are: {there or 'none'}"
        )

    # -- on each rank

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._runs, self._values = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_part: dict[str, list[tuple[ReadItem, _Run]]] = {}
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                value = io.BytesIO()
                torch.save(self._values[item.storage_index.fqn], value)
                value.seek(0)
                planner.load_bytes(item, value)
            else:
                run = self._runs[_key(item.storage_index)]
                by_part.setdefault(run.part, []).append((item, run))
        for part, items in by_part.items():
            part_file.verify(self._storage, part)
            ranges = [
                (run.begin, run.begin + torch.Size(run.size).numel() * run.dtype.itemsize) for _, run in items
            ]
            read = part_file.read_ranges(self._storage, part, ranges)
            for (item, run), raw in zip(items, read, strict=True):
                values = raw.view(run.dtype).view(run.size)
                for dimension, (at, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    values = values.narrow(dimension, at, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(values)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _values_of(manifest: bytes) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Returns what the manifest says of models, optimizers, and names, with tensors of no memory; and the paths of each
    tensor in it, by the name under which it is stored. A tensor has several paths if several of the state's tensors had
    one memory. Raises StateCodecError."""
    described = state_codec.described_tensors(manifest)
    parsed = json.loads(manifest)
    wanted = ("modules", "optimizers", NAMES, OTHER_NAMES)
    try:
        pairs = [pair for pair in parsed["state"]["dict"] if pair[0] in wanted]
    except (LookupError, TypeError) as error:
        raise state_codec.MalformedManifest(f"the state's manifest is not one of ours: {error!r}") from error
    text = json.dumps({**parsed, "state": {"dict": pairs}}).encode()
    empty = [
        torch.zeros((), dtype=state_codec.dtype_of(d["dtype"]), device="cpu").expand(d["shape"])
        for d in described
    ]
    values: dict[str, Any] = state_codec.decode(text, empty, plain_tuples=True)
    stored = {id(tensor): d["name"] for tensor, d in zip(empty, described, strict=True)}
    paths: dict[str, list[str]] = {}
    for part in ("modules", "optimizers"):
        for path, tensor in _tensors_in(values.get(part), part):
            if (name := stored.get(id(tensor))) is not None:
                paths.setdefault(name, []).append(path)
    return values, paths


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of a decoded state with their paths, as they are stored."""
    if isinstance(value, torch.Tensor | LocalPart):
        yield path, value.local if isinstance(value, LocalPart) else value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_in(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{path}.{index}")


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset or ())


def _placed_entries(header: Header) -> Iterator[tuple[int, Entry]]:
    """Yields each entry of a tensor and where its bytes begin behind the header."""
    at = 0
    for entry in header.entries:
        if entry.tensor != STATE:
            yield at, entry
        at += entry.size_bytes


def _chunks_of(
    header: Header, entry: Entry, begin: int, part: str, described: dict[str, Any]
) -> Iterator[tuple[_Run, Box]]:
    dtype = state_codec.dtype_of(described["dtype"])
    placed = header.placed.get(entry.tensor)
    box = Box.whole(described["shape"]) if placed is None else placed.box
    first, last = entry.first, entry.first + entry.size_bytes // dtype.itemsize
    for at, chunk in boxes_of_run(box, first, last):
        yield _Run(part, begin + (at - first) * dtype.itemsize, chunk.size, dtype), chunk


def _shown_name(tensor: str, names: list[Any]) -> str | None:
    """Returns the tensor's name in torch's get_state_dict; None for what that does not have."""
    if match := _TENSOR_OF_MODEL.fullmatch(tensor):
        return f"{_numbered('model', int(match[1]))}.{match[2]}"
    if match := _STATE_OF_OPTIMIZER.fullmatch(tensor):
        parameter = _parameter(names, int(match[1]), int(match[2]))
        return parameter and f"{_numbered('optimizer', int(match[1]))}.state.{parameter}.{match[3]}"
    return None


def _shown_names(paths: Sequence[str], names: list[Any]) -> list[str]:
    """Returns the names of the tensor with these paths in torch's get_state_dict."""
    shown = (_shown_name(path, names) for path in paths)
    return list(dict.fromkeys(name for name in shown if name is not None))


def _other_names(others: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Returns the further names of models' tensors in torch's get_state_dict, with the first name of each."""
    words = [f"{_numbered('model', number)}." for number in range(len(others))]
    return {
        word + name: word + first
        for word, of_model in zip(words, others, strict=True)
        for name, first in of_model.items()
    }


def _numbered(word: str, number: int) -> str:
    return f"{word}_{number}" if number else word


def _parameter(names: list[Any], optimizer: int, number: int) -> str | None:
    """Returns the parameter's name, if the checkpoint has names."""
    of_one = names[optimizer] if optimizer < len(names) else []
    found = of_one[number] if number < len(of_one) else None
    return found if isinstance(found, str) else None


def _plain_values(values: dict[str, Any], names: list[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the values of optimizers that are no tensors, by name."""
    for o, optimizer in enumerate(values.get("optimizers", [])):
        word = _numbered("optimizer", o)
        groups = optimizer.get("param_groups", [])
        for g, group in enumerate(groups):
            for key, value in group.items():
                if key == "params":
                    value = [_parameter(names, o, number) for number in value]
                if not isinstance(value, (torch.Tensor, LocalPart)):
                    yield f"{word}.param_groups.{g}.{key}", value
        for number in chain.from_iterable(group["params"] for group in groups):
            parameter = _parameter(names, o, number)
            for key, value in optimizer.get("state", {}).get(number, {}).items():
                if parameter is not None and not isinstance(value, (torch.Tensor, LocalPart)):
                    yield f"{word}.state.{parameter}.{key}", value
