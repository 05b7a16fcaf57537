"""Describes the structure of a cached value: its parts, and the offset of each among its bytes.

A layout is a tree: containers, and leaves with their place in the payload. It is written as JSON, so values of one
data set mostly have the same layout, letter by letter, and reading one is a look-up. Nothing in it names code: a
named tuple's class is taken only if the script itself has imported it.
Invariant: `parse` accepts no layout whose leaves exceed the payload it claims, however it came about.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from bagua_core.cache.errors import UnreadableError

MOST_NESTED = 64
MOST_DIMENSIONS = 64
PAYLOAD_ALIGNMENT_BYTES = 16  # the largest element, complex128
_LARGEST_BYTES = 1 << 48
_LONGEST_REMEMBERED = 4096  # bytes of a layout; what is longer has been made for one value
_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufcmMSU]\d{1,9})(?:\[[a-zA-Z0-9]{1,8}\])?")
_TORCH_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and str(dtype) == f"torch.{name}"
    and not name.startswith(("q", "bits"))
    and not re.fullmatch(r"u?int[1-7]|.*x2", name)
}

Literal: TypeAlias = str | int | float | bool | bytes | None


@dataclass(frozen=True, slots=True)
class Nothing:
    """None itself."""


@dataclass(frozen=True, slots=True)
class Number:
    """kind: i (64 bits), f (binary64), c (two of them), b (one byte, 0 or 1)."""

    kind: str
    at: int


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list or tuple of nothing but integers of 64 bits, or of floats, such as tokens."""

    kind: str
    as_tuple: bool
    at: int
    count: int


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes of a known length. kind: s (UTF-8), y (bytes), I (a larger integer), P (a pickle)."""

    kind: str
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class ArrayLeaf:
    """scalar: a NumPy scalar, whose shape is ()."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    scalar: bool
    at: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Sequence:
    """kind: l (list), u (tuple), n (named tuple of the class that is there)."""

    kind: str
    items: tuple[Node, ...]
    named: type | None = None


@dataclass(frozen=True, slots=True)
class Mapping:
    keys: tuple[Literal, ...]
    items: tuple[Node, ...]


Node: TypeAlias = Nothing | Number | Numbers | Run | TensorLeaf | ArrayLeaf | Sequence | Mapping


@dataclass(frozen=True, slots=True)
class Layout:
    root: Node
    payload_bytes: int


_NUMBER_BYTES = {"i": 8, "f": 8, "c": 16, "b": 1}


class Places:
    """Hands out places in the payload, in the order in which the leaves are met."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size_bytes: int, alignment: int) -> int:
        at = -(-self.end // alignment) * alignment
        self.end = at + size_bytes
        return at


def number_place(places: Places, kind: str) -> int:
    size = _NUMBER_BYTES[kind]
    return places.take(size, min(size, 8))


def padded(size_bytes: int) -> int:
    return -(-size_bytes // PAYLOAD_ALIGNMENT_BYTES) * PAYLOAD_ALIGNMENT_BYTES


def torch_dtype_name(dtype: torch.dtype) -> str | None:
    """None for a dtype whose elements are not plain bytes."""
    name = str(dtype).removeprefix("torch.")
    return name if _TORCH_DTYPES.get(name) is dtype else None


def numpy_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """None for a dtype that is not plain bytes (objects, records, types of other packages)."""
    if dtype.hasobject or dtype.fields is not None or dtype.itemsize == 0 or dtype.subdtype is not None:
        return None
    return dtype.str if _NUMPY_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype else None


def literal(value: Literal) -> Any:
    """A dictionary's key as JSON."""
    if isinstance(value, bytes):
        return ["y", value.decode("latin-1")]
    if isinstance(value, float):
        return ["f", value.hex()]
    return value


def parse(text: bytes) -> Layout:
    """Raises UnreadableError for whatever `encoding` does not write."""
    return _remembered(text) if len(text) <= _LONGEST_REMEMBERED else _parsed(text)


@functools.lru_cache(maxsize=512)
def _remembered(text: bytes) -> Layout:
    return _parsed(text)


def _parsed(text: bytes) -> Layout:
    try:
        described = json.loads(text)
        places = Places()
        root = _node(described, places, 0)
    except UnreadableError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError) as error:
        raise UnreadableError(f"a layout that is not one: {type(error).__name__}: {error}") from error
    return Layout(root, padded(places.end))


def _node(described: Any, places: Places, depth: int) -> Node:
    if depth > MOST_NESTED:
        raise UnreadableError(f"a value nested more than {MOST_NESTED} deep")
    if places.end > _LARGEST_BYTES:
        raise UnreadableError("a layout of more bytes than any value has")
    if described is None:
        return Nothing()
    tag, *content = described
    if tag in _NUMBER_BYTES and not content:
        return Number(tag, number_place(places, tag))
    if tag == "N":
        kind, container, count = content
        _require_size(count)
        if kind not in ("i", "f") or container not in ("l", "u"):
            raise UnreadableError(f"numbers of kind {kind!r} in {container!r}")
        return Numbers(kind, container == "u", places.take(8 * count, 8), count)
    if tag in ("s", "y", "I", "P"):
        (size,) = content
        _require_size(size)
        return Run(tag, places.take(size, 1), size)
    if tag == "t":
        name, shape = content
        dtype = _TORCH_DTYPES[name]
        size = _size_of(shape, dtype.itemsize)
        return TensorLeaf(dtype, tuple(shape), places.take(size, PAYLOAD_ALIGNMENT_BYTES), size)
    if tag in ("a", "g"):
        name, shape = content
        if not _NUMPY_DTYPE.fullmatch(name):
            raise UnreadableError(f"an array of dtype {name!r}")
        numpy_dtype = np.dtype(name)
        size = _size_of(shape, numpy_dtype.itemsize)
        if numpy_dtype.itemsize == 0 or (tag == "g" and shape):
            raise UnreadableError(f"an array of dtype {name!r} and shape {shape}")
        place = places.take(size, PAYLOAD_ALIGNMENT_BYTES)
        return ArrayLeaf(numpy_dtype, tuple(shape), tag == "g", place, size)
    if tag in ("l", "u"):
        return Sequence(tag, tuple(_node(item, places, depth + 1) for item in content))
    if tag == "n":
        module, name, *items = content
        named = named_tuple_class(module, name)
        if named is None or len(named._fields) != len(items):  # type: ignore[attr-defined]
            raise UnreadableError(f"a named tuple {module}.{name}, which this script does not have")
        return Sequence(tag, tuple(_node(item, places, depth + 1) for item in items), named)
    if tag == "d":
        keys = tuple(_literal(key) for key in content[::2])
        if len(content) % 2 or len(set(keys)) != len(keys):
            raise UnreadableError("a dictionary whose keys do not go with its values")
        return Mapping(keys, tuple(_node(item, places, depth + 1) for item in content[1::2]))
    raise UnreadableError(f"a layout with the unknown tag {tag!r}")


def _literal(described: Any) -> Literal:
    if isinstance(described, list):
        tag, content = described
        if tag == "y":
            return bytes(content, "latin-1")
        if tag == "f":
            return float.fromhex(content)
        raise UnreadableError(f"a key with the unknown tag {tag!r}")
    if described is None or isinstance(described, (str, bool, int)):
        return described
    raise UnreadableError(f"a key that is a {type(described).__name__}")


def _require_size(size: Any) -> None:
    if type(size) is not int or not 0 <= size <= _LARGEST_BYTES:
        raise UnreadableError(f"a part of {size!r} bytes")


def _size_of(shape: Any, itemsize: int) -> int:
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS:
        raise UnreadableError(f"a shape {shape!r}")
    for extent in shape:
        _require_size(extent)
    # extents beside a 0 count as well: torch and numpy compute strides from them
    if math.prod(max(extent, 1) for extent in shape) * itemsize > _LARGEST_BYTES:
        raise UnreadableError(f"a shape {shape!r}")
    return math.prod(shape) * itemsize


def named_tuple_class(module: Any, name: Any) -> type | None:
    """The class, if the script has imported it under this name; nothing is imported, no code runs."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not issubclass(found, tuple):
        return None
    fields = vars(found).get("_fields")
    return found if isinstance(fields, tuple) else None
