"""Encodes a value as a frame, and decodes frames, many at once.

A frame is a head, a layout and a payload, contiguous. The head holds a checksum of all that follows it, the key's
digest, and the lengths; see `FRAME`. The layout is JSON: the dtype and shape of each part of the payload, and the
value's tree (value_tree.py), whose leaves are the parts' numbers. So values of one data set mostly have the same
layout, letter by letter. Tensors and arrays lie in the payload as they lie in memory. The tags of the leaves: t
(tensor), a (array), g (NumPy scalar), n (number, or list of numbers), m (tuple of numbers), i (integer of more than
64 bits), s (text), y (bytes), p (pickle).

Frames of one layout and length are copied side by side, checked together, and cut into columns, so a batch of equal
samples costs little more than the copy. The decoded values belong to the caller: writable, in memory of their own.
Samples of one call may share that memory's storage, each its own part of it. No pickle, unless the caller allows it for
what has no other form.
Invariant: no part of a layout exceeds the payload of its frame, also in a layout that no encoder wrote.
"""

from __future__ import annotations

import array
import functools
import json
import math
import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from bagua_core import value_tree
from bagua_core.cache import row_memory
from bagua_core.cache.checksum import checksums
from bagua_core.cache.errors import NotCacheableError, UnreadableError

FORMAT = 2
# checksum, magic, format, digest of the key, bytes of the frame, bytes of the layout
FRAME = struct.Struct("<Q 6s H 16s Q Q")
MAGIC = b"bagua\0"
KEY_AT, SIZES_AT = 16, 32
CHECKED_FROM = 8  # the checksum does not count itself
_TEXT_BYTES_AT = FRAME.size - 8
_ALIGNMENT_BYTES = 16  # the largest element, complex128
_LARGEST_BYTES = 1 << 48
_LONGEST_REMEMBERED = 4096  # bytes of a layout; what is longer has been made for one value
_LARGEST_TOGETHER_BYTES = 1 << 26  # copied side by side up to this; a sample kept keeps so much at most
_PICKLE_ADVICE = (
    "keep numbers, strings, bytes, tensors, NumPy arrays, lists, tuples and dictionaries, or pickle=True"
)

_JSON = json.JSONEncoder(separators=(",", ":"), check_circular=False)

Buffer: TypeAlias = bytes | bytearray | memoryview
_Rows: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]


def padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _place(end: int, size_bytes: int, itemsize: int) -> int:
    """Returns where a part goes behind the byte `end`. Encoder and decoder agree on it, so no layout holds it."""
    alignment = _ALIGNMENT_BYTES if size_bytes >= _ALIGNMENT_BYTES else itemsize & -itemsize
    return -(-end // alignment) * alignment


# -- encoding


def encode(value: Any, key: bytes, allow_pickle: bool = False) -> bytearray:
    """Encodes a value as a frame of a multiple of 16 bytes. The value is copied: it may change afterwards.

    Raises NotCacheableError, naming the part, for what would not be decoded as an equal value.
    """
    encoder = _Encoder()
    try:
        tree = encoder.node(value, "the value")
    except NotCacheableError as error:
        if not allow_pickle:
            raise NotCacheableError(f"{error}; {_PICKLE_ADVICE}") from None
        encoder = _Encoder()
        tree = encoder.pickled(value)
    text = _JSON.encode([encoder.parts, tree]).encode()
    head_bytes = padded(FRAME.size + len(text))
    frame = bytearray(head_bytes + padded(encoder.end))
    FRAME.pack_into(frame, 0, 0, MAGIC, FORMAT, key, len(frame), len(text))
    frame[FRAME.size : FRAME.size + len(text)] = text
    whole = memoryview(frame)
    for at, content in encoder.contents:
        whole[head_bytes + at : head_bytes + at + len(content)] = content
    words = np.frombuffer(frame, dtype=np.uint64, offset=CHECKED_FROM).reshape(1, -1)
    struct.pack_into("<Q", frame, 0, int(checksums(words)[0]))
    return frame


class _Encoder(value_tree.TreeEncoder):
    """Encodes a value as a tree, and collects the parts of the payload.

    parts: dtype and shape of each. contents: where in the payload each lies, and its bytes. end: of the payload.
    """

    refusal = NotCacheableError

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, Sequence[int]]] = []
        self.contents: list[tuple[int, bytes | memoryview]] = []
        self.end = 0

    def pickled(self, value: Any) -> Any:
        try:
            content = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise NotCacheableError(f"a {type(value).__name__} is not pickled: {error}") from error
        return self._bytes("p", content)

    def node(self, value: Any, path: str) -> Any:
        kind = type(value)
        if (kind is list or kind is tuple) and len(value) > 1 and type(value[0]) in (int, float):
            numbers = self._numbers(value, kind)
            if numbers is not None:
                return numbers
        return super().node(value, path)

    def leaf(self, value: Any, kind: type, path: str) -> Any:
        if value is None:
            return None
        if kind is bool:
            return self._part("n", "|b1", (), b"\1" if value else b"\0", 1)
        if kind is int:
            if -(1 << 63) <= value < 1 << 63:
                return self._part("n", "<i8", (), struct.pack("<q", value), 8)
            return self._bytes("i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is float:
            return self._part("n", "<f8", (), struct.pack("<d", value), 8)
        if kind is complex:
            return self._part("n", "<c16", (), struct.pack("<dd", value.real, value.imag), 16)
        if kind is str:
            return self._bytes("s", value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return self._bytes("y", value)
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array("a" if kind is np.ndarray else "g", np.asarray(value), path)
        return super().leaf(value, kind, path)

    def _part(
        self, tag: str, dtype: str, shape: Sequence[int], content: bytes | memoryview, itemsize: int
    ) -> Any:
        at = _place(self.end, len(content), itemsize)
        self.parts.append((dtype, shape))
        self.contents.append((at, content))
        self.end = at + len(content)
        return {tag: len(self.parts) - 1}

    def _bytes(self, tag: str, content: bytes) -> Any:
        return self._part(tag, "|u1", (len(content),), content, 1)

    def _numbers(self, value: Any, kind: type) -> Any:
        """Encodes a list or tuple of 64-bit integers only, or of floats only, as one part; None for any other."""
        common = type(value[0])
        if set(map(type, value)) != {common}:
            return None
        try:
            content = array.array("q" if common is int else "d", value).tobytes()
        except OverflowError:
            return None
        tag, dtype = "n" if kind is list else "m", "<i8" if common is int else "<f8"
        return self._part(tag, dtype, (len(value),), content, 8)

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        name = value_tree.torch_dtype_name(tensor.dtype)
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if name is None or not plain or tensor.dim() > value_tree.MOST_DIMENSIONS:
            raise NotCacheableError(
                f"{path} is a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}, "
                f"requires_grad={tensor.requires_grad}; detach it, on the CPU, dense"
            )
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        return self._part("t", name, tensor.shape, content, tensor.itemsize)

    def _array(self, tag: str, content: np.ndarray[Any, np.dtype[Any]], path: str) -> Any:
        name = value_tree.numpy_dtype_name(content.dtype)
        if name is None:
            raise NotCacheableError(f"{path} is a NumPy array of {content.dtype}")
        return self._part(
            tag, name, content.shape, np.ascontiguousarray(content).tobytes(), content.dtype.itemsize
        )


# -- layouts


@dataclass(frozen=True, slots=True)
class _Part:
    dtype: Any  # torch's or NumPy's
    shape: tuple[int, ...]
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Layout:
    parts: tuple[_Part, ...]
    tree: Any
    payload_bytes: int


def _parse(text: bytes) -> _Layout:
    """Parses the text of a layout. Raises one of STUMBLES for what `encode` does not write."""
    described, tree = json.loads(text)
    parts = []
    end = 0
    for name, shape in described:
        dtype = value_tree.numpy_dtype(name) if name[0] in "<>|" else value_tree.torch_dtype(name)
        size_bytes = _size_of(shape, dtype.itemsize)
        at = _place(end, size_bytes, dtype.itemsize)
        parts.append(_Part(dtype, tuple(shape), at, size_bytes))
        end = at + size_bytes
    return _Layout(tuple(parts), tree, padded(end))


_remembered = functools.lru_cache(maxsize=512)(_parse)


def _size_of(shape: Any, itemsize: int) -> int:
    """Returns the bytes of an array of this shape. Raises ValueError for a shape that `encode` does not write."""
    if not isinstance(shape, list) or len(shape) > value_tree.MOST_DIMENSIONS:
        raise ValueError(f"a shape {shape!r}")
    if not all(type(extent) is int and 0 <= extent <= _LARGEST_BYTES for extent in shape):
        raise ValueError(f"a shape {shape!r}")
    # extents beside a 0 count as well: torch and numpy compute strides from them
    if math.prod(max(extent, 1) for extent in shape) * itemsize > _LARGEST_BYTES:
        raise ValueError(f"a shape {shape!r}")
    return math.prod(shape) * itemsize


# -- decoding


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Takes the place of a value that could not be decoded. error: the reason."""

    error: UnreadableError


def decode_many(frames: Sequence[Buffer], keys: Sequence[bytes], allow_pickle: bool = False) -> list[Any]:
    """Returns the values in order, an Unreadable for each frame that is damaged or not `keys`' own."""
    values: list[Any] = [None] * len(frames)
    alike: dict[int, list[int]] = {}
    for index, frame in enumerate(frames):
        alike.setdefault(len(frame), []).append(index)
    for size_bytes, indices in alike.items():
        if size_bytes < FRAME.size or size_bytes % _ALIGNMENT_BYTES:
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


def _read(frames: Sequence[Buffer], keys: list[bytes], allow_pickle: bool) -> list[Any]:
    """Decodes frames that all have one length."""
    size_bytes = len(frames[0])
    rows = row_memory.rows(len(frames), size_bytes)
    whole = memoryview(rows.data).cast("B")
    for i, frame in enumerate(frames):
        whole[i * size_bytes : (i + 1) * size_bytes] = frame
    # the copies are checked, not the originals, which others may write to meanwhile
    values: list[Any] = [None] * len(rows)
    for text, places in _by_layout(rows, keys, values).items():
        chosen = rows if len(places) == len(rows) else rows[places]
        for place, value in zip(places, _values(chosen, text, allow_pickle), strict=True):
            values[place] = value
    return values


def _by_layout(rows: _Rows, keys: list[bytes], values: list[Any]) -> dict[bytes, Sequence[int]]:
    """Groups the rows by layout: text to row numbers. For damaged rows puts the reason into `values`."""
    words = rows.view(np.uint64)
    whole = (checksums(words[:, CHECKED_FROM // 8 :]) == words[:, 0]).tolist()
    try:
        if len(rows) > 1 and all(whole) and _are_alike(rows, keys):
            return {_layout_text(rows[0], keys[0]): range(len(rows))}
    except UnreadableError as error:
        values[:] = [Unreadable(error)] * len(rows)
        return {}
    groups: dict[bytes, Sequence[int]] = {}
    for number, row in enumerate(rows):
        try:
            if not whole[number]:
                raise UnreadableError("the checksum does not fit the bytes")
            text = _layout_text(row, keys[number])
            groups[text] = [*groups.get(text, ()), number]
        except UnreadableError as error:
            values[number] = Unreadable(error)
    return groups


def _are_alike(rows: _Rows, keys: list[bytes]) -> bool:
    """Tells whether all rows are their keys' own, and have the first one's head and layout."""
    end = FRAME.size + int(rows[0, _TEXT_BYTES_AT : FRAME.size].view(np.uint64)[0])
    if end > rows.shape[1]:
        return False
    if rows[:, KEY_AT:SIZES_AT].tobytes() != b"".join(keys):
        return False
    first = rows[0]
    alike: bool = (rows[:, SIZES_AT:end] == first[SIZES_AT:end]).all() and (
        rows[:, CHECKED_FROM:KEY_AT] == first[CHECKED_FROM:KEY_AT]
    ).all()
    return alike


def _layout_text(row: _Rows, key: bytes) -> bytes:
    """Returns the layout's text in a frame. Raises UnreadableError for one that is damaged or of another key."""
    _, magic, version, found, size_bytes, text_bytes = FRAME.unpack_from(row.data)
    if magic != MAGIC or version != FORMAT:
        raise UnreadableError(f"a frame of another kind (magic {magic!r}, format {version})")
    if found != key:
        raise UnreadableError("the frame of another key")
    if size_bytes != len(row) or text_bytes > len(row) - FRAME.size:
        raise UnreadableError(f"{len(row)} bytes of a frame of {size_bytes}")
    return row[FRAME.size : FRAME.size + text_bytes].tobytes()


def _values(rows: _Rows, text: bytes, allow_pickle: bool) -> list[Any]:
    try:
        layout = _remembered(text) if len(text) <= _LONGEST_REMEMBERED else _parse(text)
        head_bytes = padded(FRAME.size + len(text))
        if head_bytes + layout.payload_bytes != rows.shape[1]:
            raise ValueError(f"a layout of {layout.payload_bytes} bytes in a frame of {rows.shape[1]}")
        columns = _Columns(rows[:, head_bytes:], layout.parts, allow_pickle)
        return value_tree.values(layout.tree, len(rows), columns.leaf)
    except value_tree.STUMBLES as error:
        return [Unreadable(UnreadableError(f"{type(error).__name__}: {error}"))] * len(rows)


class _Columns:
    """Decodes the same part of all values at once. rows: [values, payload bytes], writable."""

    def __init__(self, rows: _Rows, parts: Sequence[_Part], allow_pickle: bool) -> None:
        self._rows = rows
        self._parts = parts
        self._allow_pickle = allow_pickle

    def leaf(self, tag: str, index: Any) -> list[Any]:
        part = self._parts[index]
        column = self._rows[:, part.at : part.at + part.size_bytes]
        if tag == "t":
            return self._tensors(part, column)
        if isinstance(part.dtype, torch.dtype):
            raise ValueError(f"a leaf {tag!r} of {part.dtype}")
        match tag:
            case "n":
                return self._numbers(part, column)
            case "m":
                return [tuple(row) for row in self._numbers(part, column)]
            case "a":
                return [row.reshape(part.shape) for row in self._elements(part, column)]
            case "g":
                return list(self._elements(part, column)[:, 0])
            case "s":
                return [row.tobytes().decode("utf-8", "surrogatepass") for row in column]
            case "y":
                return [row.tobytes() for row in column]
            case "i":
                return [int.from_bytes(row.tobytes(), "little", signed=True) for row in column]
            case "p":
                return [self._unpickled(row.tobytes()) for row in column]
        return value_tree.unknown_tag(tag, index)

    def _tensors(self, part: _Part, column: _Rows) -> list[Any]:
        if not isinstance(part.dtype, torch.dtype):
            raise ValueError(f"a tensor of {part.dtype}")
        if part.size_bytes == 0:
            return [torch.empty(part.shape, dtype=part.dtype, device="cpu") for _ in column]
        return list(torch.from_numpy(column).view(part.dtype).view(len(column), *part.shape).unbind(0))

    def _numbers(self, part: _Part, column: _Rows) -> list[Any]:
        numbers: list[Any] = self._elements(part, column).reshape(len(column), *part.shape).tolist()
        return numbers

    def _elements(self, part: _Part, column: _Rows) -> np.ndarray[Any, np.dtype[Any]]:
        """Returns the elements of a part: [values, elements]."""
        if part.size_bytes == 0:
            return np.empty((len(column), 0), dtype=part.dtype)
        elements: np.ndarray[Any, np.dtype[Any]] = column.view(part.dtype)
        return elements

    def _unpickled(self, raw: bytes) -> Any:
        if not self._allow_pickle:
            raise ValueError("a pickled value, and pickle=True was not asked for")
        try:
            return pickle.loads(raw)
        except Exception as error:  # a class that is gone or has changed may raise anything
            raise ValueError(f"a pickle that does not load: {type(error).__name__}: {error}") from error
