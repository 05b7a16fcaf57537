"""Decodes frames into values, many at once, and never runs code from a frame.

Frames of one layout and length are copied side by side, checked together, and cut into columns, so a batch of equal
samples costs little more than the copy. The decoded values belong to the caller: writable, in memory of their own.
Samples of one call may share that memory's storage, each its own part of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from bagua_core.cache import row_memory
from bagua_core.cache.checksum import checksums
from bagua_core.cache.encoding import CHECKED_FROM, FORMAT, FRAME, KEY_AT, MAGIC, SIZES_AT
from bagua_core.cache.errors import UnreadableError
from bagua_core.cache.layout import (
    PAYLOAD_ALIGNMENT_BYTES,
    ArrayLeaf,
    Mapping,
    Node,
    Nothing,
    Number,
    Numbers,
    Run,
    Sequence,
    TensorLeaf,
    padded,
    parse,
)

Buffer: TypeAlias = bytes | bytearray | memoryview
_Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
_NUMPY_NUMBERS = {"i": np.dtype("<i8"), "f": np.dtype("<f8"), "c": np.dtype("<c16")}
_TEXT_BYTES_AT = FRAME.size - 8
_LARGEST_TOGETHER_BYTES = (
    1 << 26
)  # frames are copied side by side up to this; a sample kept keeps so much at most


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands where a value should be. error: why it is none."""

    error: UnreadableError


def decode(frame: Buffer, key: bytes, allow_pickle: bool = False) -> Any:
    """One value. Raises UnreadableError."""
    (value,) = decode_many([frame], [key], allow_pickle)
    if isinstance(value, Unreadable):
        raise value.error
    return value


def decode_many(frames: Many[Buffer], keys: Many[bytes], allow_pickle: bool = False) -> list[Any]:
    """The values in order, an Unreadable for each frame that is damaged or not `keys`' own."""
    values: list[Any] = [None] * len(frames)
    alike: dict[int, list[int]] = {}
    for index, frame in enumerate(frames):
        alike.setdefault(len(frame), []).append(index)
    for size_bytes, indices in alike.items():
        if size_bytes < FRAME.size or size_bytes % PAYLOAD_ALIGNMENT_BYTES:
            for index in indices:
                values[index] = Unreadable(UnreadableError(f"{size_bytes} bytes are no frame"))
            continue
        most = max(1, _LARGEST_TOGETHER_BYTES // size_bytes)
        for begin in range(0, len(indices), most):
            some = indices[begin : begin + most]
            read = _read([frames[i] for i in some], [keys[i] for i in some], allow_pickle)
            for index, value in zip(some, read, strict=True):
                values[index] = value
    return values


def _read(frames: Many[Buffer], raw: list[bytes], allow_pickle: bool) -> list[Any]:
    """Of frames of one length."""
    size_bytes = len(frames[0])
    rows = row_memory.rows(len(frames), size_bytes)
    whole = memoryview(rows.data).cast("B")
    for i, frame in enumerate(frames):
        whole[i * size_bytes : (i + 1) * size_bytes] = frame
    # the copies are checked, not the originals, which others may write to meanwhile
    values: list[Any] = [None] * len(rows)
    for text, places in _by_layout(rows, raw, values):
        chosen = rows if len(places) == len(rows) else rows[places]
        for place, value in zip(places, _values(chosen, text, allow_pickle), strict=True):
            values[place] = value
    return values


def _by_layout(rows: _Rows, raw: list[bytes], values: list[Any]) -> list[tuple[bytes, list[int]]]:
    """The layouts there are, with the numbers of the rows that have them; for the others says in `values` why not."""
    words = rows.view(np.uint64)
    whole = (checksums(words[:, CHECKED_FROM // 8 :]) == words[:, 0]).tolist()
    groups: dict[bytes, list[int]] = {}
    together = len(rows) > 1 and all(whole) and _are_alike(rows, raw)
    for number in range(1 if together else len(rows)):
        try:
            if not whole[number]:
                raise UnreadableError("the checksum does not fit the bytes")
            groups.setdefault(_layout_text(rows[number], raw[number]), []).append(number)
        except UnreadableError as error:
            values[number] = Unreadable(error)
    if together and groups:
        return [(text, list(range(len(rows)))) for text in groups]
    if together:
        values[:] = values[:1] * len(rows)
    return list(groups.items())


def _are_alike(rows: _Rows, raw: list[bytes]) -> bool:
    """Whether all rows are their keys' own, and have the first one's head and layout."""
    end = FRAME.size + int(rows[0, _TEXT_BYTES_AT : FRAME.size].view(np.uint64)[0])
    if end > rows.shape[1]:
        return False
    if rows[:, KEY_AT:SIZES_AT].tobytes() != b"".join(raw):
        return False
    first = rows[0]
    alike: bool = (rows[:, SIZES_AT:end] == first[SIZES_AT:end]).all() and (
        rows[:, CHECKED_FROM:KEY_AT] == first[CHECKED_FROM:KEY_AT]
    ).all()
    return alike


def _layout_text(row: _Rows, raw: bytes) -> bytes:
    """Of the frame that belongs to the key. Raises UnreadableError."""
    _, magic, version, found, size_bytes, text_bytes = FRAME.unpack_from(row.data)
    if magic != MAGIC or version != FORMAT:
        raise UnreadableError(f"a frame of another kind (magic {magic!r}, format {version})")
    if found != raw:
        raise UnreadableError("the frame of another key")
    if size_bytes != len(row) or text_bytes > len(row) - FRAME.size:
        raise UnreadableError(f"{len(row)} bytes of a frame of {size_bytes}")
    return row[FRAME.size : FRAME.size + text_bytes].tobytes()


def _values(rows: _Rows, text: bytes, allow_pickle: bool) -> list[Any]:
    try:
        layout = parse(text)
        head_bytes = padded(FRAME.size + len(text))
        if head_bytes + layout.payload_bytes != rows.shape[1]:
            raise UnreadableError(f"a layout of {layout.payload_bytes} bytes in a frame of {rows.shape[1]}")
        return _Columns(rows[:, head_bytes:], allow_pickle).of(layout.root)
    except UnreadableError as error:
        return [Unreadable(error)] * len(rows)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        # what torch or numpy make of a layout that no encoder wrote
        return [Unreadable(UnreadableError(f"{type(error).__name__}: {error}"))] * len(rows)


class _Columns:
    """The same leaf of all values at once. rows: [values, payload bytes], writable."""

    def __init__(self, rows: _Rows, allow_pickle: bool) -> None:
        self._rows = rows
        self._count = len(rows)
        self._tensor: torch.Tensor | None = None
        self._allow_pickle = allow_pickle

    def of(self, node: Node) -> list[Any]:
        match node:
            case TensorLeaf():
                return self._tensors(node)
            case Number():
                return self._numbers(node)
            case ArrayLeaf():
                return self._arrays(node)
            case Numbers():
                column = self._rows[:, node.at : node.at + 8 * node.count].view(_NUMPY_NUMBERS[node.kind])
                lists = column.tolist()
                return [tuple(row) for row in lists] if node.as_tuple else lists
            case Run():
                return [self._run(node, row) for row in self._rows]
            case Sequence():
                columns = [self.of(item) for item in node.items]
                return _containers(node, list(zip(*columns, strict=True)) if columns else [()] * self._count)
            case Mapping():
                columns = [self.of(item) for item in node.items]
                keys = node.keys
                if not columns:
                    return [{} for _ in range(self._count)]
                return [dict(zip(keys, items, strict=True)) for items in zip(*columns, strict=True)]
            case Nothing():
                return [None] * self._count

    def _tensors(self, leaf: TensorLeaf) -> list[Any]:
        if leaf.size_bytes == 0:
            return [torch.empty(leaf.shape, dtype=leaf.dtype) for _ in range(self._count)]
        if self._tensor is None:
            self._tensor = torch.from_numpy(self._rows)
        column = self._tensor[:, leaf.at : leaf.at + leaf.size_bytes]
        return list(column.view(leaf.dtype).view(self._count, *leaf.shape).unbind(0))

    def _arrays(self, leaf: ArrayLeaf) -> list[Any]:
        if leaf.size_bytes == 0:
            return [np.empty(leaf.shape, dtype=leaf.dtype) for _ in range(self._count)]
        column = self._rows[:, leaf.at : leaf.at + leaf.size_bytes].view(leaf.dtype)
        if leaf.scalar:
            return list(column[:, 0])
        return [row.reshape(leaf.shape) for row in column]

    def _numbers(self, leaf: Number) -> list[Any]:
        if leaf.kind == "b":
            return [bool(byte) for byte in self._rows[:, leaf.at].tolist()]
        dtype = _NUMPY_NUMBERS[leaf.kind]
        column = self._rows[:, leaf.at : leaf.at + dtype.itemsize].view(dtype)
        numbers: list[Any] = column[:, 0].tolist()
        return numbers

    def _run(self, leaf: Run, row: _Rows) -> Any:
        raw = row[leaf.at : leaf.at + leaf.size_bytes].tobytes()
        match leaf.kind:
            case "y":
                return raw
            case "s":
                return raw.decode("utf-8", "surrogatepass")
            case "I":
                return int.from_bytes(raw, "little", signed=True)
        return self._unpickled(raw)

    def _unpickled(self, raw: bytes) -> Any:
        if not self._allow_pickle:
            raise UnreadableError("a pickled value, and pickle=True was not asked for")
        try:
            return pickle.loads(raw)
        except Exception as error:  # a class that is gone or has changed may raise anything
            raise UnreadableError(f"a pickle that does not load: {type(error).__name__}: {error}") from error


def _containers(node: Sequence, items: list[tuple[Any, ...]]) -> list[Any]:
    if node.kind == "l":
        return [list(row) for row in items]
    if node.named is not None:
        return [tuple.__new__(node.named, row) for row in items]
    return list(items)
