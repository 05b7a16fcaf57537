"""Encodes state for transfer between workers: a JSON manifest and one run of bytes, without pickle.

Owns the mapping of nested plain values and tensors to (manifest, tensors) and back, the virtual
concatenation of the tensors' bytes (any range of which can be read or written without a copy of the
whole), and its digest. Knows nothing of who sends to whom.
Invariants: decode(encode(x)) equals x; every tensor starts at a multiple of ALIGNMENT_BYTES.
"""

from __future__ import annotations

import base64
import json
import math
import sys
import zlib
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch

from bagua_core.elastic.state.flat_digest import digest_of_bytes
from bagua_core.elastic.state.heal_memory import is_out_of_memory

ALIGNMENT_BYTES = 64  # so that tensors can be views of the received bytes, whatever their dtype
_VERSION = 1
_MOST_DIMENSIONS = 64
# What a corrupted manifest makes of Python, torch and numpy; all of it means that the manifest is none of ours.
_STUMBLES = (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError)


class StateCodecError(TypeError):
    """The state holds something that cannot travel, or the manifest is not one of ours."""


# -- the run of bytes


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _is_dense(tensor: torch.Tensor) -> bool:
    """Its elements fill one run of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 0:
            return True
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a dense tensor as uint8, not a copy."""
    count = tensor.numel()
    return torch.as_strided(tensor.detach(), (count,), (1,)).view(torch.uint8)


class FlatTensors(Sequence[torch.Tensor]):
    """Tensors seen as one run of bytes, each padded to ALIGNMENT_BYTES. Holds no copy of them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._starts: list[int] = []
        at = 0
        for tensor in self._tensors:
            if not _is_dense(tensor):
                raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with gaps has no run of bytes")
            self._starts.append(at)
            at += _padded(tensor.nbytes)
        self.size_bytes = at

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        return self._tensors[index]

    def __len__(self) -> int:
        return len(self._tensors)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(offset from begin, bytes of one tensor) for all that lies in [begin, end)."""
        for index, first, last in self.spans(begin, end):
            yield self._starts[index] + first - begin, bytes_of(self._tensors[index])[first:last]

    def spans(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(index of a tensor, first and last of its bytes) for all that lies in [begin, end)."""
        if not 0 <= begin <= end <= self.size_bytes:
            raise ValueError(f"bytes {begin}..{end} are not within 0..{self.size_bytes}")
        index = max(0, bisect_right(self._starts, begin) - 1)
        while index < len(self._tensors) and self._starts[index] < end:
            tensor, start = self._tensors[index], self._starts[index]
            first, last = max(begin - start, 0), min(end - start, tensor.nbytes)
            if first < last:
                yield index, first, last
            index += 1


def _flat(tensors: Sequence[torch.Tensor]) -> FlatTensors:
    return tensors if isinstance(tensors, FlatTensors) else FlatTensors(tensors)


def flat_size_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return _flat(tensors).size_bytes


def byte_ranges(total_bytes: int, parts: int, part: int) -> tuple[int, int]:
    """Begin and end of one of `parts` contiguous stripes, cut where a tensor may begin."""
    blocks = -(-total_bytes // ALIGNMENT_BYTES)
    begin, end = blocks * part // parts, blocks * (part + 1) // parts
    return begin * ALIGNMENT_BYTES, min(end * ALIGNMENT_BYTES, total_bytes)


def read_bytes(tensors: Sequence[torch.Tensor], begin: int, out: torch.Tensor) -> None:
    """Fill `out` (uint8, any device) with the bytes from `begin` on; padding reads as zero."""
    covered = 0
    for at, piece in _flat(tensors).pieces(begin, begin + out.numel()):
        if at > covered:
            out[covered:at].zero_()
        out[at : at + piece.numel()].copy_(piece)
        covered = at + piece.numel()
    if covered < out.numel():
        out[covered:].zero_()


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """63 bits that follow from the tensors' bytes and sizes, the same on every device.

    Catches accidents (a flipped bit, exchanged blocks), not intent.
    """
    return digest_of_bytes(bytes_of(t if _is_dense(t) else t.contiguous()) for t in tensors)


# -- encoding


def encode(state: Any) -> tuple[bytes, FlatTensors]:
    """Manifest (JSON, UTF-8) and the tensors it refers to, which are the live ones: read them before they
    change. Tensors with gaps are copied; two names of one memory travel once.

    Raises StateCodecError naming the path and the type of what cannot travel.
    """
    return _Encoder(named=False).encode(state)


def encode_named(state: Any) -> tuple[bytes, FlatTensors, list[dict[str, Any]]]:
    """As `encode`, and the tensors' descriptions, which here have a name too: the keys that lead to the tensor, without
    square brackets. No two names are the same."""
    encoder = _Encoder(named=True)
    return *encoder.encode(state), encoder.described


# Nodes: null, true, false, integers, finite floats and strings stand for themselves; a list is a list;
# everything else is {tag: content} with one of the tags below.


class _Encoder:
    def __init__(self, named: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.described: list[dict[str, Any]] = []
        self._names: set[str] | None = set() if named else None
        self._known: dict[tuple[Any, ...], int] = {}
        self._open: set[int] = set()

    def encode(self, state: Any) -> tuple[bytes, FlatTensors]:
        node = self.node(state, "state")
        manifest = {"version": _VERSION, "tensors": self.described, "state": node}
        text = json.dumps(manifest, allow_nan=False, separators=(",", ":"))
        return text.encode(), FlatTensors(self.tensors)

    def node(self, value: Any, path: str) -> Any:
        # exact types: a subclass would come back as something else
        kind = type(value)
        if value is None or kind is bool or kind is int or kind is str:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is torch.dtype or kind is torch.device:
            return {kind.__name__: str(value).removeprefix("torch.")}
        if kind in (list, tuple, dict, OrderedDict, defaultdict, Counter):
            return self._container(value, kind, path)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if kind is numpy.ndarray:
                return {"array": self._array(numpy, value, path)}
            if isinstance(value, numpy.generic) and not value.dtype.hasobject and value.dtype.fields is None:
                raw = base64.b64encode(value.tobytes()).decode("ascii")
                return {"scalar": [value.dtype.str, raw]}
        raise StateCodecError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot travel to another worker; "
            "keep numbers, strings, lists, dictionaries, tensors or numpy arrays in state_dict()"
        )

    def _container(self, value: Any, kind: type, path: str) -> Any:
        if id(value) in self._open:
            raise StateCodecError(f"{path} contains itself")
        self._open.add(id(value))
        try:
            if kind is list or kind is tuple:
                items = [self.node(item, f"{path}[{place}]") for place, item in enumerate(value)]
                return items if kind is list else {"tuple": items}
            pairs = []
            for key, item in value.items():
                self._require_key(key, path)
                where = f"{path}[{key!r}]"
                pairs.append([self.node(key, f"key {where}"), self.node(item, where)])
            return {"counter" if kind is Counter else "dict": pairs}
        finally:
            self._open.discard(id(value))

    def _require_key(self, key: Any, path: str) -> None:
        if type(key) is tuple:
            for part in key:
                self._require_key(part, path)
        elif key is not None and type(key) not in (str, int, bool, float):
            raise StateCodecError(f"{path} has the key {key!r} of type {type(key).__qualname__}")

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise StateCodecError(f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise StateCodecError(
                f"{path} is a tensor that is not plain memory (layout {tensor.layout}, dtype {tensor.dtype}, "
                f"device {tensor.device})"
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if not _is_dense(tensor):
            tensor = tensor.contiguous()
        return self._add(tensor, path)

    def _add(self, tensor: torch.Tensor, path: str) -> int:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device))
        if tensor.numel() and key in self._known:
            return self._known[key]
        self.tensors.append(tensor)
        self.described.append(
            {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "device": tensor.device.type,
            }
        )
        if self._names is not None:
            self.described[-1]["name"] = self._unique(_name(path), self._names)
        self._known[key] = len(self.tensors) - 1
        return len(self.tensors) - 1

    def _unique(self, name: str, taken: set[str]) -> str:
        while name in taken:
            name += "'"
        taken.add(name)
        return name

    def _array(self, numpy: Any, array: Any, path: str) -> list[Any]:
        if array.dtype.hasobject or array.dtype.fields is not None or array.dtype.itemsize == 0:
            raise StateCodecError(f"{path} is a numpy array of {array.dtype}")
        raw = numpy.frombuffer(bytearray(array.tobytes()), dtype=numpy.uint8)
        return [array.dtype.str, list(array.shape), self._add(torch.from_numpy(raw), path)]


def _name(path: str) -> str:
    """`optimizers.0.state.3.exp_avg` for `state['optimizers'][0]['state'][3]['exp_avg']`."""
    dotted = (
        path.replace("']", "").replace("['", ".").replace("]", "").replace("[", ".").removeprefix("state.")
    )
    return dotted.encode(errors="backslashreplace").decode()  # JSON readers refuse half characters


# -- decoding


def announced_bytes(manifest: bytes) -> int:
    """The size of the run of bytes that belongs to `manifest`. Raises StateCodecError."""
    described = described_tensors(manifest)
    return sum(_padded(math.prod(d["shape"]) * dtype_of(d["dtype"]).itemsize) for d in described)


def described_tensors(manifest: bytes) -> list[dict[str, Any]]:
    """Each tensor's dtype, shape, stride and device, and its name if `encode_named` made the manifest.

    Raises StateCodecError.
    """
    described: list[dict[str, Any]] = _parsed(manifest)["tensors"]
    return described


def allocate(
    manifest: bytes, device: torch.device | str | None = None, *, row_major: bool = False
) -> FlatTensors:
    """Memory for the tensors of `manifest`, to be filled by the caller.

    device: where those go that were not on the CPU; None keeps all on the CPU. row_major: whatever their strides.
    Raises StateCodecError, also where there is no memory for what is announced.
    """
    try:
        tensors = []
        for d in described_tensors(manifest):
            where = "cpu" if device is None or d["device"] == "cpu" else device
            dtype, shape = dtype_of(d["dtype"]), d["shape"]
            if row_major:
                tensors.append(torch.empty(shape, dtype=dtype, device=where))
            else:
                tensors.append(torch.empty_strided(shape, d["stride"], dtype=dtype, device=where))
        return FlatTensors(tensors)
    except (MemoryError, RuntimeError) as error:
        raise StateCodecError(f"no memory for what the state's manifest announces: {error}") from error


def decode(
    manifest: bytes,
    source: torch.Tensor | Sequence[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    copy: bool = True,
) -> Any:
    """The state. source: its run of bytes (uint8), or the tensors of `allocate`, which it will then hold.

    device: as in `allocate`. copy False: tensors are views of the run where they can be, which then lives
    as long as any of them.
    Raises StateCodecError for a manifest of another kind, ValueError if the bytes are too few.
    """
    parsed = _parsed(manifest)
    if isinstance(source, torch.Tensor):
        tensors = _cut(parsed["tensors"], source, device, copy)
    else:
        tensors = list(source)
        if len(tensors) != len(parsed["tensors"]):
            raise ValueError(f"{len(tensors)} tensors for a manifest of {len(parsed['tensors'])}")
    try:
        return _value(parsed["state"], tensors)
    except StateCodecError:
        raise
    except _STUMBLES as error:
        if is_out_of_memory(error):
            raise  # the caller may find another place for it
        raise StateCodecError(f"the state's manifest is not one of ours: {error}") from error


def _parsed(manifest: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise StateCodecError(f"the state's manifest is unreadable: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("version") != _VERSION:
        raise StateCodecError(f"the state's manifest is not of version {_VERSION}")
    tensors = parsed.get("tensors")
    if "state" not in parsed or not isinstance(tensors, list) or not all(map(_is_described, tensors)):
        raise StateCodecError("the state's manifest describes its tensors in another way")
    return parsed


def _is_described(d: Any) -> bool:
    """Whether it describes one dense tensor: then its extent is its size, and no stride leads out of it."""
    if not isinstance(d, dict) or not all(isinstance(d.get(name), str) for name in ("dtype", "device")):
        return False
    shape, stride = d.get("shape"), d.get("stride")
    for numbers in (shape, stride):
        if not isinstance(numbers, list) or len(numbers) > _MOST_DIMENSIONS:
            return False
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            return False
    assert isinstance(shape, list) and isinstance(stride, list)
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size == 0:
            return True
        if size > 1 and step != expected:
            return False
        expected *= size
    return expected < 1 << 59


def dtype_of(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise StateCodecError(f"this torch has no dtype {name!r}")
    return dtype


def _cut(
    described: list[dict[str, Any]], run: torch.Tensor, device: torch.device | str | None, copy: bool
) -> list[torch.Tensor]:
    tensors = []
    at = 0
    for d in described:
        dtype, shape = dtype_of(d["dtype"]), d["shape"]
        size_bytes = math.prod(shape) * dtype.itemsize
        if at + size_bytes > run.numel():
            raise ValueError(f"the state has at least {at + size_bytes} bytes, {run.numel()} arrived")
        piece = run[at : at + size_bytes]
        if copy or piece.data_ptr() % dtype.itemsize or piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()
        try:
            tensor = torch.as_strided(piece.view(dtype), shape, d["stride"])
        except RuntimeError as error:
            raise StateCodecError(f"the state's manifest describes no tensor: {error}") from error
        if device is not None and d["device"] != "cpu":
            tensor = tensor.to(device)
        tensors.append(tensor)
        at += _padded(size_bytes)
    return tensors


def _value(node: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(node, list):
        return [_value(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, content),) = node.items()
    match tag:
        case "float":
            return float(content)
        case "bytes":
            return base64.b64decode(content)
        case "tensor":
            return tensors[content]
        case "size":
            return torch.Size(content)
        case "dtype":
            return dtype_of(content)
        case "device":
            return torch.device(content)
        case "tuple":
            return tuple(_value(item, tensors) for item in content)
        case "dict":
            return {_value(key, tensors): _value(item, tensors) for key, item in content}
        case "counter":
            return Counter({_value(key, tensors): _value(item, tensors) for key, item in content})
        case "array":
            import numpy

            dtype, shape, index = content
            raw = tensors[index].cpu().numpy().tobytes()
            return numpy.frombuffer(bytearray(raw), dtype=numpy.dtype(dtype)).reshape(shape)
        case "scalar":
            import numpy

            dtype, text = content
            return numpy.frombuffer(base64.b64decode(text), dtype=numpy.dtype(dtype))[0]
    raise StateCodecError(f"the state's manifest has the unknown tag {tag!r}")


def layout_of(manifest: bytes) -> int:
    """A digest of the data types and shapes that a manifest describes: stripes of one state agree in it."""
    return zlib.crc32(json.dumps(json.loads(manifest)["tensors"], sort_keys=True).encode())
