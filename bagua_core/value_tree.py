"""Describes nested Python containers as a JSON tree and rebuilds them, without pickle.

Shared by the state that workers copy and checkpoint (elastic/state/state_codec.py) and by cached samples
(cache/frames.py). Both cut tensors out of the tree; each decides how its own leaves are written.

A node is null, a boolean, an integer, a finite float or a string, which stand for themselves; a list of nodes; or
{tag: content}. The tags of this module are `_TAGS`; a user of the module may have others.
Invariant: decoding imports nothing and calls no code but that of the types named here. A named tuple is only rebuilt if
the script has imported its class.
"""

from __future__ import annotations

import base64
import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

MOST_NESTED = 200
MOST_DIMENSIONS = 64
STUMBLES = (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)
"""What a malformed tree makes of Python, torch and NumPy while it is decoded."""

_NUMPY_DTYPE = re.compile(r"[<>|](?:[biufcmMSUV]\d{1,9})(?:\[[a-zA-Z0-9]{1,8}\])?")
_TORCH_DTYPES = {
    name: dtype
    for name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype)
    and str(dtype) == f"torch.{name}"
    and not name.startswith(("q", "bits"))
    and not re.fullmatch(r"u?int[1-7]|.*x2", name)
}
_TORCH_DTYPE_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}


def torch_dtype(name: Any) -> torch.dtype:
    """Returns torch's dtype of this name. Raises ValueError for what names no dtype of plain bytes."""
    dtype = _TORCH_DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def torch_dtype_name(dtype: torch.dtype) -> str | None:
    """Returns the name of `dtype`; None for one whose elements are not plain bytes."""
    return _TORCH_DTYPE_NAMES.get(dtype)


def numpy_dtype(name: Any) -> np.dtype[Any]:
    """Returns NumPy's dtype of this name. Raises ValueError for what names no dtype of plain bytes."""
    if not isinstance(name, str) or not _NUMPY_DTYPE.fullmatch(name) or not np.dtype(name).itemsize:
        raise ValueError(f"an array of dtype {name!r}")
    return np.dtype(name)


@functools.lru_cache
def numpy_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """Returns the name of `dtype`; None for one that is not plain bytes (objects, records, types of other packages)."""
    if dtype.hasobject or dtype.fields is not None or dtype.itemsize == 0 or dtype.subdtype is not None:
        return None
    return dtype.str if _NUMPY_DTYPE.fullmatch(dtype.str) and np.dtype(dtype.str) == dtype else None


# -- encoding


class TreeEncoder:
    """Walks containers; `leaf`, which a subclass extends, takes what is not one of the mappings, lists and tuples.

    refusal: raised, with the path and the type, for what cannot be encoded.
    mappings: encoded as dictionaries, and decoded as `dict`, but for Counter.
    """

    refusal: type[Exception] = TypeError
    mappings: tuple[type, ...] = (dict, Counter)

    def __init__(self) -> None:
        self._open: set[int] = set()

    def node(self, value: Any, path: str) -> Any:
        # exact types: a subclass would come back as something else
        kind = type(value)
        if kind in self.mappings or kind is list or (isinstance(value, tuple) and kind is not torch.Size):
            return self._container(value, kind, path)
        return self.leaf(value, kind, path)

    def leaf(self, value: Any, kind: type, path: str) -> Any:
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype or kind is torch.device:
            return {kind.__name__: str(value).removeprefix("torch.")}
        raise self.refusal(f"{path} is a {kind.__module__}.{kind.__qualname__}")

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if id(value) in self._open or len(self._open) >= MOST_NESTED:
            raise self.refusal(f"{path} contains itself, or is nested more than {MOST_NESTED} deep")
        self._open.add(id(value))
        try:
            if kind in self.mappings:
                pairs = [
                    [self._key(key, path), self.node(item, f"{path}[{key!r}]")] for key, item in value.items()
                ]
                return {"counter" if kind is Counter else "dict": pairs}
            items = [self.node(item, f"{path}[{place}]") for place, item in enumerate(value)]
        finally:
            self._open.discard(id(value))
        if kind is list:
            return items
        if kind is tuple:
            return {"tuple": items}
        if _named_tuple_class(kind.__module__, kind.__qualname__) is not kind:
            raise self.refusal(
                f"{path} is a {kind.__module__}.{kind.__qualname__}: no named tuple that is found by this name"
            )
        return {"named": [kind.__module__, kind.__qualname__, items]}

    def _key(self, key: Any, path: str) -> Any:
        if type(key) is tuple:
            return {"tuple": [self._key(part, path) for part in key]}
        if key is not None and type(key) not in (str, int, bool, float, bytes):
            raise self.refusal(f"{path} has the key {key!r} of type {type(key).__qualname__}")
        return inline(key)


def inline(value: bool | int | float | str | bytes | None) -> Any:
    """Returns the node of a plain value that is kept in the tree."""
    if type(value) is float and not math.isfinite(value):
        return {"float": repr(value)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    return value


# -- decoding

_Leaf: TypeAlias = Callable[[str, Any], list[Any]]
_TAGS = frozenset({"dict", "counter", "tuple", "named", "float", "bytes", "size", "dtype", "device"})


def values(node: Any, count: int, leaf: _Leaf, depth: int = 0) -> list[Any]:
    """Returns `count` values of the form that `node` describes, which differ in their leaves.

    leaf: the `count` values of a node {tag: content} with a tag of the caller's; raises ValueError for another.
    Raises one of STUMBLES for what no encoder writes.
    """
    if depth > MOST_NESTED:
        raise ValueError(f"nested more than {MOST_NESTED} deep")
    if isinstance(node, list):
        return [list(row) for row in _rows(node, count, leaf, depth)]
    if not isinstance(node, dict):
        return [node] * count
    ((tag, content),) = node.items()
    if tag not in _TAGS:
        return leaf(tag, content)
    match tag:
        case "dict" | "counter":
            return _mappings(tag, content, count, leaf, depth)
        case "tuple":
            return _rows(content, count, leaf, depth)
        case "named":
            return _named_tuples(content, count, leaf, depth)
        case "float":
            return [float(content)] * count
        case "bytes":
            return [base64.b64decode(content)] * count
        case "size":
            return [torch.Size(content)] * count
        case "dtype":
            return [torch_dtype(content)] * count
    return [torch.device(content)] * count


def without_names(node: Any) -> Any:
    """Returns the tree with plain tuples in the places of named ones, for a reader that may lack their classes.

    Raises one of STUMBLES for what no encoder writes.
    """
    if isinstance(node, list):
        return [without_names(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    match tag:
        case "named":
            _, _, items = content
            return {"tuple": without_names(items)}
        case "tuple":
            return {tag: without_names(content)}
        case "dict" | "counter":
            return {tag: [[key, without_names(item)] for key, item in content]}
    return node


def by_path(node: Any, tag: str, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Returns the contents of the leaves of this tag in lists, tuples and dictionaries, by their place in the tree:
    numbers, and the `repr` of keys. Raises one of STUMBLES for what no encoder writes."""
    if not isinstance(node, (list, dict)):
        return {}
    items: list[tuple[tuple[str, ...], Any]] = []
    if isinstance(node, list):
        items = [((*path, str(place)), item) for place, item in enumerate(node)]
    else:
        ((found, content),) = node.items()
        if found == tag:
            return {path: content}
        if found == "dict":
            items = [((*path, repr(key)), item) for key, item in content]
        elif found == "tuple":
            items = [(path, content)]
    return {place: leaf for at, item in items for place, leaf in by_path(item, tag, at).items()}


def unknown_tag(tag: str, content: Any) -> list[Any]:
    """Refuses any tag: the `leaf` of a tree that has none of its own. Raises ValueError."""
    raise ValueError(f"the unknown tag {tag!r}")


def _rows(nodes: Sequence[Any], count: int, leaf: _Leaf, depth: int) -> list[Any]:
    """Returns tuples of the values of `nodes`."""
    columns = [values(node, count, leaf, depth + 1) for node in nodes]
    return list(zip(*columns, strict=True)) if columns else [()] * count


def _mappings(tag: str, pairs: Sequence[Any], count: int, leaf: _Leaf, depth: int) -> list[Any]:
    keys = [key if type(key) is str else values(key, 1, unknown_tag, depth)[0] for key, _ in pairs]
    if len(set(keys)) != len(keys):
        raise ValueError("a dictionary has one key twice")
    rows = [
        dict(zip(keys, row, strict=True)) for row in _rows([item for _, item in pairs], count, leaf, depth)
    ]
    return rows if tag == "dict" else [Counter(row) for row in rows]


def _named_tuples(content: Any, count: int, leaf: _Leaf, depth: int) -> list[Any]:
    module, name, items = content
    found: Any = _named_tuple_class(module, name)
    if found is None or len(found._fields) != len(items):
        raise ValueError(f"a named tuple {module}.{name}, which this script does not have")
    return [tuple.__new__(found, row) for row in _rows(items, count, leaf, depth)]


def _named_tuple_class(module: Any, name: Any) -> type | None:
    """Returns the class, if the script has imported it under this name; nothing is imported, no code runs."""
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if not isinstance(found, type) or not issubclass(found, tuple):
        return None
    return found if isinstance(vars(found).get("_fields"), tuple) else None
