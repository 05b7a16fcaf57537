"""Encodes a value as a frame: head, layout and payload, contiguous.

The head holds a checksum of all that follows it, the key's digest, and the lengths; see `FRAME`. Tensors and arrays
lie in the payload as they lie in memory. No pickle, unless the caller allows it for what has no other form.
"""

from __future__ import annotations

import array
import json
import pickle
import struct
from typing import Any

import numpy as np
import torch

from bagua_core.cache.checksum import checksums
from bagua_core.cache.errors import NotCacheableError
from bagua_core.cache.layout import (
    MOST_DIMENSIONS,
    MOST_NESTED,
    PAYLOAD_ALIGNMENT_BYTES,
    Places,
    literal,
    named_tuple_class,
    number_place,
    numpy_dtype_name,
    padded,
    torch_dtype_name,
)

FORMAT = 1
# checksum, magic, format, digest of the key, bytes of the frame, bytes of the layout
FRAME = struct.Struct("<Q 6s H 16s Q Q")
MAGIC = b"bagua\0"
KEY_AT, SIZES_AT = 16, 32
CHECKED_FROM = 8  # the checksum does not count itself
_PICKLE_ADVICE = (
    "keep numbers, strings, bytes, tensors, NumPy arrays, lists, tuples and dictionaries, or pickle=True"
)


def encode(value: Any, key: bytes, allow_pickle: bool = False) -> bytearray:
    """A frame of a multiple of PAYLOAD_ALIGNMENT_BYTES. The value is copied: it may change afterwards.

    Raises NotCacheableError, naming the part, for what comes back as nothing equal.
    """
    try:
        parts = _Parts(value)
    except NotCacheableError:
        if not allow_pickle:
            raise
        parts = _Parts.of_pickle(value)
    text = json.dumps(parts.described, separators=(",", ":")).encode()
    head_bytes = padded(FRAME.size + len(text))
    frame = bytearray(head_bytes + padded(parts.places.end))
    FRAME.pack_into(frame, 0, 0, MAGIC, FORMAT, key, len(frame), len(text))
    frame[FRAME.size : FRAME.size + len(text)] = text
    whole = memoryview(frame)
    for at, content in parts.runs:
        whole[head_bytes + at : head_bytes + at + len(content)] = content
    words = np.frombuffer(frame, dtype=np.uint64, offset=CHECKED_FROM).reshape(1, -1)
    struct.pack_into("<Q", frame, 0, int(checksums(words)[0]))
    return frame


class _Parts:
    """A value taken apart: its layout as JSON, and which bytes lie where in the payload."""

    def __init__(self, value: Any) -> None:
        self.places = Places()
        self.runs: list[tuple[int, bytes | memoryview]] = []
        self._open: set[int] = set()
        self.described = self._node(value, "the value", 0)

    @classmethod
    def of_pickle(cls, value: Any) -> _Parts:
        try:
            pickled = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError) as error:
            raise NotCacheableError(f"a {type(value).__name__} is not pickled: {error}") from error
        parts = cls(None)
        parts.described = parts._run("P", pickled)
        return parts

    def _node(self, value: Any, path: str, depth: int) -> Any:
        # exact types: a subclass would come back as something else
        kind = type(value)
        if value is None:
            return None
        if kind is bool:
            return self._number("b", b"\1" if value else b"\0")
        if kind is int:
            if -(1 << 63) <= value < 1 << 63:
                return self._number("i", struct.pack("<q", value))
            return self._run("I", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        if kind is float:
            return self._number("f", struct.pack("<d", value))
        if kind is complex:
            return self._number("c", struct.pack("<dd", value.real, value.imag))
        if kind is str:
            return self._run("s", value.encode("utf-8", "surrogatepass"))
        if kind is bytes:
            return self._run("y", value)
        if kind is torch.Tensor:
            return self._tensor(value, path)
        if kind is np.ndarray:
            return self._array("a", value, path)
        if isinstance(value, np.generic):
            return self._array("g", np.asarray(value), path)
        if kind in (list, tuple, dict) or isinstance(value, tuple):
            return self._container(value, kind, path, depth)
        raise NotCacheableError(f"{path} is a {kind.__module__}.{kind.__qualname__}; {_PICKLE_ADVICE}")

    def _container(self, value: Any, kind: type, path: str, depth: int) -> Any:
        if id(value) in self._open or depth >= MOST_NESTED:
            raise NotCacheableError(f"{path} contains itself, or is nested more than {MOST_NESTED} deep")
        self._open.add(id(value))
        if kind is dict:
            described: list[Any] = ["d"]
            for key, item in value.items():
                if type(key) not in (str, int, float, bool, bytes, type(None)):
                    raise NotCacheableError(f"{path} has the key {key!r}; {_PICKLE_ADVICE}")
                described += [literal(key), self._node(item, f"{path}[{key!r}]", depth + 1)]
        elif (numbers := self._numbers(value, kind)) is not None:
            described = numbers
        else:
            described = self._sequence_head(value, kind, path)
            described += [self._node(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        self._open.discard(id(value))
        return described

    def _sequence_head(self, value: Any, kind: type, path: str) -> list[Any]:
        if kind is list or kind is tuple:
            return ["l" if kind is list else "u"]
        if named_tuple_class(kind.__module__, kind.__qualname__) is kind:
            return ["n", kind.__module__, kind.__qualname__]
        raise NotCacheableError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}: no named tuple that is found by this name"
        )

    def _numbers(self, value: Any, kind: type) -> list[Any] | None:
        if kind not in (list, tuple) or len(value) < 2 or type(value[0]) not in (int, float):
            return None
        common = type(value[0])
        if any(type(item) is not common for item in value):
            return None
        try:
            content = array.array("q" if common is int else "d", value).tobytes()
        except OverflowError:
            return None
        place = self.places.take(len(content), 8)
        self.runs.append((place, content))
        return ["N", "i" if common is int else "f", "l" if kind is list else "u", len(value)]

    def _number(self, kind: str, content: bytes) -> Any:
        self.runs.append((number_place(self.places, kind), content))
        return [kind]

    def _run(self, kind: str, content: bytes) -> Any:
        self.runs.append((self.places.take(len(content), 1), content))
        return [kind, len(content)]

    def _tensor(self, tensor: torch.Tensor, path: str) -> Any:
        name = torch_dtype_name(tensor.dtype)
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
        if name is None or not plain or tensor.dim() > MOST_DIMENSIONS:
            raise NotCacheableError(
                f"{path} is a tensor of {tensor.dtype} on {tensor.device}, {tensor.layout}, "
                f"requires_grad={tensor.requires_grad}; detach it, on the CPU, dense"
            )
        flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
        content = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
        self.runs.append((self.places.take(content.nbytes, PAYLOAD_ALIGNMENT_BYTES), content))
        return ["t", name, list(tensor.shape)]

    def _array(self, tag: str, array: np.ndarray[Any, np.dtype[Any]], path: str) -> Any:
        name = numpy_dtype_name(array.dtype)
        if name is None:
            raise NotCacheableError(f"{path} is a NumPy array of {array.dtype}; {_PICKLE_ADVICE}")
        content = np.ascontiguousarray(array).tobytes()
        self.runs.append((self.places.take(len(content), PAYLOAD_ALIGNMENT_BYTES), content))
        return [tag, name, list(array.shape)]
