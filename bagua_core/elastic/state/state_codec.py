"""Encodes state for transfer between workers and for checkpoints: a JSON manifest and one run of bytes, without pickle.

The manifest describes the containers (value_tree.py) and each tensor; the tensors are the live ones (flat_tensors.py).
Knows nothing of who sends to whom.
Invariant: decode(encode(x)) equals x.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from bagua_core import value_tree
from bagua_core.elastic.state.flat_tensors import FlatTensors, is_dense, padded, strides_are_dense
from bagua_core.elastic.state.heal_memory import is_out_of_memory
from bagua_core.errors import BaguaError, PeerViolation, UserError
from bagua_core.model import sharded_tensors

_VERSION = 1
_LENGTH_BYTES = 8


class StateCodecError(BaguaError, TypeError):
    """A state cannot be encoded, or a manifest cannot be decoded."""


class CannotTravel(UserError, StateCodecError):
    """The state holds something that cannot be copied to another worker."""


class MalformedManifest(PeerViolation, StateCodecError):
    """The manifest is not one that `encode` writes, or announces more than there is memory for."""


class NoMemory(MalformedManifest):
    """The manifest announces more than there is memory for. It may be one that `encode` wrote."""


# -- encoding


def encode(state: Any, *, named: bool = False, what: str = "state") -> tuple[bytes, FlatTensors]:
    """Returns the manifest (JSON, UTF-8) and the tensors it refers to.

    The tensors are the live ones: read them before they change. Tensors with gaps are copied; two names of one memory
    travel once.

    named: the tensors' descriptions have a name too, the keys that lead to the tensor; no two names are the same. what:
    the first word of a path in errors.
    Raises CannotTravel naming the path and the type of what cannot travel.
    """
    encoder = _Encoder(named)
    node = encoder.node(state, what)
    manifest = {"version": _VERSION, "tensors": encoder.described, "state": node}
    text = json.dumps(manifest, allow_nan=False, separators=(",", ":"))
    return text.encode(), FlatTensors(encoder.tensors)


class _Encoder(value_tree.TreeEncoder):
    refusal = CannotTravel
    mappings = (dict, OrderedDict, defaultdict, Counter)

    def __init__(self, named: bool) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self.described: list[dict[str, Any]] = []
        self._names: set[str] | None = set() if named else None
        self._known: dict[tuple[Any, ...], int] = {}

    def leaf(self, value: Any, kind: type, path: str) -> Any:
        if value is None or kind in (bool, int, float, str, bytes):
            return value_tree.inline(value)
        if isinstance(value, torch.Tensor):
            return {"tensor": self._tensor(value, path)}
        if isinstance(value, np.generic) and value_tree.numpy_dtype_name(value.dtype):
            return {"scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]}
        if kind is np.ndarray and value_tree.numpy_dtype_name(value.dtype):
            raw = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
            return {"array": [value.dtype.str, list(value.shape), self._add(raw, path)]}
        try:
            return super().leaf(value, kind, path)
        except CannotTravel as error:
            elements = f" of {value.dtype}" if kind is np.ndarray else ""
            raise CannotTravel(
                f"{error}{elements}, which cannot travel to another worker; "
                "numbers, strings, lists, dictionaries, tensors and NumPy arrays can"
            ) from None

    def _tensor(self, tensor: torch.Tensor, path: str) -> int:
        layout = None
        if sharded_tensors.is_sharded(tensor):
            try:
                layout = sharded_tensors.Layout.of(tensor)
            except sharded_tensors.UnsavablePlacement as error:
                raise CannotTravel(f"{path} is {error}, which cannot travel to another worker") from error
            tensor = sharded_tensors.local(tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            raise CannotTravel(f"{path} is a {type(tensor).__module__}.{type(tensor).__qualname__}")
        plain = tensor.layout is torch.strided and value_tree.torch_dtype_name(tensor.dtype)
        if not plain or tensor.device.type == "meta":
            raise CannotTravel(
                f"{path} is a tensor that is not plain memory (layout {tensor.layout}, dtype {tensor.dtype}, "
                f"device {tensor.device})"
            )
        tensor = tensor.detach().resolve_conj().resolve_neg()
        return self._add(tensor if is_dense(tensor) else tensor.contiguous(), path, layout)

    def _add(self, tensor: torch.Tensor, path: str, layout: sharded_tensors.Layout | None = None) -> int:
        # one memory may be a sharded tensor and, under another name, a plain one
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device), layout)
        if tensor.numel() and key in self._known:
            return self._known[key]
        self.tensors.append(tensor)
        self.described.append(
            {
                "dtype": value_tree.torch_dtype_name(tensor.dtype),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "device": tensor.device.type,
                **({"sharded": layout.to_json()} if layout is not None else {}),
            }
        )
        if self._names is not None:
            name = _name(path)
            while name in self._names:
                name += "'"
            self._names.add(name)
            self.described[-1]["name"] = name
        self._known[key] = len(self.tensors) - 1
        return len(self.tensors) - 1


def _name(path: str) -> str:
    """Returns `optimizers.0.state.3.exp_avg` for `state['optimizers'][0]['state'][3]['exp_avg']`."""
    dotted = (
        path.replace("']", "").replace("['", ".").replace("]", "").replace("[", ".").removeprefix("state.")
    )
    return dotted.encode(errors="backslashreplace").decode()  # JSON readers refuse half characters


# -- values of scripts: length of the manifest, manifest, the tensors' bytes


def to_bytes(value: Any) -> torch.Tensor:
    """Encodes `value` as [bytes] of uint8 on the CPU. Raises CannotTravel."""
    manifest, tensors = encode(value, what="value")
    data = torch.empty(tensors.size_bytes, dtype=torch.uint8, device="cpu")
    tensors.read(0, data)
    head = bytearray(len(manifest).to_bytes(_LENGTH_BYTES, "big") + manifest)
    return torch.cat([torch.frombuffer(head, dtype=torch.uint8), data])


def from_bytes(run: torch.Tensor) -> list[Any]:
    """Returns the values whose `to_bytes` follow each other in `run`. Raises as decode does."""
    found = []
    while run.numel():
        end = _LENGTH_BYTES + int.from_bytes(run[:_LENGTH_BYTES].numpy().tobytes(), "big")
        manifest = run[_LENGTH_BYTES:end].numpy().tobytes()
        found.append(decode(manifest, run[end:]))
        run = run[end + announced_bytes(manifest) :]
    return found


# -- decoding


def announced_bytes(manifest: bytes) -> int:
    """Returns the size of the run of bytes that belongs to `manifest`. Raises MalformedManifest."""
    described = described_tensors(manifest)
    return sum(padded(math.prod(d["shape"]) * dtype_of(d["dtype"]).itemsize) for d in described)


def described_tensors(manifest: bytes) -> list[dict[str, Any]]:
    """Returns each tensor's dtype, shape, stride and device, and its name if it was encoded with names.

    Raises MalformedManifest.
    """
    described: list[dict[str, Any]] = _parsed(manifest)["tensors"]
    return described


def layout_of(manifest: bytes) -> int:
    """Returns a digest of a manifest's descriptions of tensors (see described_tensors): stripes of one state agree in
    it."""
    return zlib.crc32(json.dumps(json.loads(manifest)["tensors"], sort_keys=True).encode())


def allocate(
    manifest: bytes, device: torch.device | str | None = None, *, row_major: bool = False
) -> FlatTensors:
    """Allocates memory for the tensors of `manifest`, to be filled by the caller.

    device: the place of those that were not on the CPU; None keeps all on the CPU. row_major: in row-major order,
    whatever their strides.
    Raises MalformedManifest, NoMemory.
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
        kind = NoMemory if is_out_of_memory(error) else MalformedManifest
        raise kind(f"no memory for what the state's manifest announces: {error}") from error


def decode(
    manifest: bytes,
    source: torch.Tensor | Sequence[torch.Tensor],
    *,
    device: torch.device | str | None = None,
    copy: bool = True,
    plain_tuples: bool = False,
) -> Any:
    """Returns the state that `manifest` describes.

    source: its run of bytes (uint8), or the tensors of `allocate`, which the state will then hold. A sharded tensor
    comes as a LocalPart (model/sharded_tensors.py): only the receiver knows its mesh. device: as in `allocate`. copy
    False: tensors are views of the run where they can be, which then lives as long as any of them. plain_tuples: named
    tuples come as plain ones.
    Raises MalformedManifest for a manifest of another kind, ValueError if the bytes are too few.
    """
    parsed = _parsed(manifest)
    if isinstance(source, torch.Tensor):
        tensors = _cut(parsed["tensors"], source, device, copy)
    else:
        tensors = list(source)
        if len(tensors) != len(parsed["tensors"]):
            raise ValueError(f"{len(tensors)} tensors for a manifest of {len(parsed['tensors'])}")
    tensors = [_as_described(t, d) for t, d in zip(tensors, parsed["tensors"], strict=True)]
    try:
        tree = value_tree.without_names(parsed["state"]) if plain_tuples else parsed["state"]
        (state,) = value_tree.values(tree, 1, lambda tag, content: [_leaf(tag, content, tensors)])
        return state
    except value_tree.STUMBLES as error:
        if is_out_of_memory(error):
            raise  # the caller may find another place for it
        raise MalformedManifest(f"the state's manifest is not one of ours: {error}") from error


def _as_described(tensor: torch.Tensor, described: dict[str, Any]) -> Any:
    """Returns `tensor`, as a LocalPart if it is described as sharded. Raises MalformedManifest."""
    if "sharded" not in described:
        return tensor
    try:
        return sharded_tensors.LocalPart(tensor, sharded_tensors.Layout.from_json(described["sharded"]))
    except ValueError as error:
        raise MalformedManifest(f"the state's manifest describes {error}") from error


def _leaf(tag: str, content: Any, tensors: list[Any]) -> Any:
    match tag:
        case "tensor":
            return tensors[content]
        case "array":
            dtype, shape, index = content
            raw = tensors[index].cpu().numpy().tobytes()
            return np.frombuffer(bytearray(raw), dtype=value_tree.numpy_dtype(dtype)).reshape(shape)
        case "scalar":
            dtype, text = content
            return np.frombuffer(base64.b64decode(text), dtype=value_tree.numpy_dtype(dtype))[0]
    return value_tree.unknown_tag(tag, content)


def _parsed(manifest: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise MalformedManifest(f"the state's manifest is unreadable: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("version") != _VERSION:
        raise MalformedManifest(f"the state's manifest is not of version {_VERSION}")
    tensors = parsed.get("tensors")
    if "state" not in parsed or not isinstance(tensors, list) or not all(map(_is_described, tensors)):
        raise MalformedManifest("the state's manifest describes its tensors in another way")
    return parsed


def _is_described(d: Any) -> bool:
    """Tells whether `d` describes one dense tensor: then its extent is its size, and no stride leads out of it."""
    if not isinstance(d, dict) or not all(isinstance(d.get(name), str) for name in ("dtype", "device")):
        return False
    shape, stride = d.get("shape"), d.get("stride")
    for numbers in (shape, stride):
        if not isinstance(numbers, list) or len(numbers) > value_tree.MOST_DIMENSIONS:
            return False
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            return False
    assert isinstance(shape, list) and isinstance(stride, list)
    return len(shape) == len(stride) and strides_are_dense(shape, stride) and math.prod(shape) < 1 << 59


def dtype_of(name: Any) -> torch.dtype:
    """Returns the torch data type with this name. Raises MalformedManifest."""
    try:
        return value_tree.torch_dtype(name)
    except ValueError as error:
        raise MalformedManifest(str(error)) from error


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
            raise MalformedManifest(f"the state's manifest describes no tensor: {error}") from error
        if device is not None and d["device"] != "cpu":
            tensor = tensor.to(device)
        tensors.append(tensor)
        at += padded(size_bytes)
    return tensors
