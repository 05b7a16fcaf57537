"""Reads, copies and makes sharded tensors (DTensor): their local memory, and the description of their layout.

Everything that copies, compares or saves a state works on local tensors and keeps the DTensor objects. Nothing here
communicates. torch.distributed.tensor is imported only once a script has: a tensor can't be sharded before.
"""

from __future__ import annotations

import functools
import math
import operator
import re
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bagua_core.errors import PeerViolation, UserError

_MODULE = "torch.distributed.tensor"
_PLACEMENT = re.compile(r"R|S\(\d{1,3}\)|_S\(\d{1,3}, \d{1,9}\)")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PLAIN_TYPES = frozenset(_PLAIN)
_version_of = operator.attrgetter("_version")
_MOST = 1 << 63
_MOST_DIMENSIONS = 64


class UnknownMesh(PeerViolation, ValueError):
    """Raised if a state has a sharded tensor on a mesh that no model of this worker has."""


class UnsavablePlacement(UserError, TypeError):
    """Raised for a tensor whose parts do not make it up by being put side by side. Says which placement."""


def is_sharded(value: Any) -> bool:
    """Tells whether `value` is a DTensor."""
    if type(value) in _PLAIN:
        return False
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory that this worker has of `tensor`: itself, or a DTensor's local tensor, without autograd."""
    if not is_sharded(tensor):
        return tensor
    found: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]  # to_local() records in autograd
    if type(found) not in _PLAIN and hasattr(found, "wait"):
        found = found.wait()  # the result of a collective that the script has begun
    return found.detach()


def local_bytes(value: Any) -> int:
    """Returns the size, in bytes, of a tensor on this worker; 0 for what is no tensor."""
    return local(value).nbytes if isinstance(value, torch.Tensor) else 0


def largest_part(tensor: torch.Tensor) -> int:
    """Returns an upper bound of the elements that any worker of the replica holds of `tensor`; the same on all of
    them."""
    if not is_sharded(tensor):
        return tensor.numel()
    sharded: Any = tensor
    placements, mesh_shape = tuple(map(str, sharded.placements)), tuple(sharded.device_mesh.shape)
    if not all(map(_PLACEMENT.fullmatch, placements)):
        return tensor.numel()
    try:
        _, size = local_box(tuple(tensor.shape), placements, mesh_shape, (0,) * len(mesh_shape))
    except UnsavablePlacement:
        return tensor.numel()
    return math.prod(size)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the memory of `tensor` on this worker: a plain tensor."""
    return local(tensor).detach().clone()


def version(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns numbers that change with each write to `tensor` or to its local tensor, and with its memory's address."""
    own = local(tensor)
    return tensor._version, own._version if own is not tensor else 0, own.data_ptr()


def versions(tensors: Collection[torch.Tensor]) -> list[tuple[int, ...]]:
    """Returns numbers for each tensor as `version` does. Without Python code for each of them where all are plain: a
    step asks for those of all parameters."""
    if _PLAIN_TYPES.issuperset(map(type, tensors)):
        return list(zip(map(_version_of, tensors), map(torch.Tensor.data_ptr, tensors), strict=True))
    return [version(t) for t in tensors]


def like(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Returns `value`, a local tensor, in the form of `tensor`: a DTensor if that is one."""
    return sharded_as(tensor, value) if is_sharded(tensor) and not is_sharded(value) else value


def sharded_as(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor of the local tensor `value`, with the mesh, placements and global shape of the DTensor
    `tensor`."""
    return _made(value, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def _made(value: torch.Tensor, mesh: Any, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
    with torch.no_grad():
        made: torch.Tensor = sys.modules[_MODULE].DTensor.from_local(
            value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )
    return made


# -- which workers hold the same part


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is cut over the workers of a replica. Two workers hold the same part of all tensors of one
    sharding, or of none: the same part if their coordinates in the mesh are equal in `dimensions`."""

    ranks: tuple[int, ...] = ()  # of the mesh, row by row: shard ranks
    mesh_shape: tuple[int, ...] = ()
    dimensions: tuple[int, ...] = ()  # of the mesh, that cut the tensor; it is replicated over the others

    def gives_each_its_own(self, replica_size: int) -> bool:
        """Tells whether no two of the replica's workers hold the same part. True for a replica of one worker."""
        return math.prod(self.mesh_shape[d] for d in self.dimensions) == replica_size


WHOLE = Sharding()
"""Of a plain tensor, which all workers of a replica hold."""


def sharding_of(tensor: torch.Tensor) -> Sharding:
    """Returns how `tensor` is cut over the workers of the replica."""
    if not is_sharded(tensor):
        return WHOLE
    sharded: Any = tensor
    mesh = sharded.device_mesh
    cuts = tuple(d for d, placement in enumerate(sharded.placements) if not placement.is_replicate())
    return Sharding(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.shape), cuts)


# -- the layout of a sharded tensor, as it is written down


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a tensor on the workers of a replica, and the part of it that is here."""

    shape: tuple[int, ...]  # of the global tensor
    stride: tuple[int, ...]  # of the global tensor
    placements: tuple[str, ...]  # by mesh dimension: "R", "S(dim)", "_S(dim, split factor)"
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]  # empty where the script gave none
    ranks: tuple[int, ...]  # of the mesh, row by row: shard ranks
    coordinate: tuple[int, ...]  # of this worker in the mesh
    offset: tuple[int, ...]  # of the local tensor in the global one

    @staticmethod
    def of(tensor: Any) -> Layout:
        """Returns the layout of a sharded tensor. Raises UnsavablePlacement."""
        return _layout(
            tensor.device_mesh,
            tuple(str(placement) for placement in tensor.placements),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tuple(tensor._local_tensor.shape),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "stride": list(self.stride),
            "placements": list(self.placements),
            "mesh": [list(self.mesh_shape), list(self.mesh_names), list(self.ranks)],
            "here": [list(self.coordinate), list(self.offset)],
        }

    @staticmethod
    def from_json(value: Any) -> Layout:
        """Returns the layout that `to_json` has written. Raises ValueError for what `to_json` does not make."""
        try:
            shape, stride, placements = (tuple(value[key]) for key in ("shape", "stride", "placements"))
            mesh_shape, mesh_names, ranks = map(tuple, value["mesh"])
            coordinate, offset = map(tuple, value["here"])
        except (LookupError, TypeError, ValueError) as error:
            raise ValueError(f"a layout of a sharded tensor that is none: {error!r}") from error
        numbers = (*shape, *stride, *mesh_shape, *ranks, *coordinate, *offset)
        texts = (*placements, *mesh_names)
        if not (
            all(type(n) is int and 0 <= n < _MOST for n in numbers)
            and all(type(t) is str for t in texts)
            and all(map(_PLACEMENT.fullmatch, placements))
            and len(shape) == len(stride) == len(offset) <= _MOST_DIMENSIONS
            and len(placements) == len(mesh_shape) == len(coordinate) <= _MOST_DIMENSIONS
            and len(mesh_names) in (0, len(mesh_shape))
            and all(_dimension(p) < len(shape) for p in placements)
        ):
            raise ValueError("a layout of a sharded tensor whose values no layout has")
        return Layout(shape, stride, placements, mesh_shape, mesh_names, ranks, coordinate, offset)

    @property
    def described(self) -> str:
        """The layout without ranks: the same on all shards."""
        return f"{list(self.placements)} on {list(self.mesh_shape)} {list(self.mesh_names)}"

    @property
    def is_written_here(self) -> bool:
        """Whether this worker writes its part. Of the workers of a replica that hold the same part of the tensor, one
        writes it: the first of the mesh that has the replica's first worker."""
        places = zip(self.placements, self.coordinate, strict=True)
        return 0 in self.ranks and all(at == 0 for placement, at in places if placement == "R")


# A state has many tensors of few layouts, and is described while the members of a generation wait for each other. A
# mesh works out its ranks anew each time.
@functools.lru_cache(maxsize=4096)
def _layout(
    mesh: Any,
    placements: tuple[str, ...],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> Layout:
    for placement in placements:
        if not _PLACEMENT.fullmatch(placement):
            raise UnsavablePlacement(f"a tensor with the placement {placement}")
    coordinate = tuple(mesh.get_coordinate() or ())
    offset, size = local_box(shape, placements, tuple(mesh.shape), coordinate)
    if size != local_shape:
        raise UnsavablePlacement(
            f"a tensor of which this worker holds {local_shape} instead of {size}, as the placements {placements} say"
        )
    return Layout(
        shape,
        stride,
        placements,
        tuple(mesh.shape),
        tuple(mesh.mesh_dim_names or ()),
        tuple(mesh.mesh.flatten().tolist()),
        coordinate,
        offset,
    )


def local_box(
    shape: tuple[int, ...],
    placements: tuple[str, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns offset and size of what the worker at `coordinate` holds of a tensor of `shape`.

    Each placement divides what those before it left, as torch.chunk does. A strided one (`_S`) divides what a later
    placement of the same dimension leaves: fully_shard on top of tensor parallelism. Raises UnsavablePlacement for a
    strided one of another kind.
    """
    offset, size = [0] * len(shape), list(shape)
    for at in _order(placements, mesh_shape):
        dimension = _dimension(placements[at])
        if dimension >= 0:
            chunk = -(-size[dimension] // mesh_shape[at])
            begin = min(size[dimension], chunk * coordinate[at])
            offset[dimension] += begin
            size[dimension] = min(chunk, size[dimension] - begin)
    return tuple(offset), tuple(size)


def _order(placements: tuple[str, ...], mesh_shape: tuple[int, ...]) -> list[int]:
    """Returns the mesh's dimensions, the strided ones behind that which they follow. Raises UnsavablePlacement."""
    order = [at for at, placement in enumerate(placements) if not placement.startswith("_S")]
    for at, placement in reversed(list(enumerate(placements))):
        if placement.startswith("_S"):
            dimension, factor = map(int, re.findall(r"\d+", placement))
            if factor != math.prod(
                mesh_shape[i] for i in order if i > at and _dimension(placements[i]) == dimension
            ):
                raise UnsavablePlacement(
                    f"a tensor with the placements {placements}, whose parts are no boxes"
                )
            order.append(at)
    return order


def _dimension(placement: str) -> int:
    """Returns the dimension of the tensor that the placement divides; -1 if it divides none."""
    found = re.search(r"\d+", placement)
    return -1 if found is None else int(found[0])


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A sharded tensor whose mesh is not known yet: decoded from bytes that another worker or a disk had."""

    local: torch.Tensor
    layout: Layout


class Meshes:
    """Finds the meshes of this worker by what a layout says of them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Collects the meshes of the sharded ones of `tensors`, which are the models'."""
        self._known: dict[Any, Any] = {}
        for tensor in tensors:
            if is_sharded(tensor):
                layout = Layout.of(tensor)
                self._known.setdefault(_mesh_key(layout), tensor.device_mesh)  # type: ignore[attr-defined]

    def placed(self, value: Any) -> Any:
        """Returns `value`, nested containers of a state, with each LocalPart made a DTensor. Containers without one are
        kept.

        Raises UnknownMesh.
        """
        if isinstance(value, LocalPart):
            return self._made(value)
        if type(value) is dict:
            items = {key: self.placed(item) for key, item in value.items()}
            return value if all(items[key] is value[key] for key in items) else items
        if isinstance(value, (list, tuple)):
            found = [self.placed(item) for item in value]
            if all(a is b for a, b in zip(found, value, strict=True)):
                return value
            return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
        return value

    def _made(self, part: LocalPart) -> torch.Tensor:
        layout = part.layout
        mesh = self._known.get(_mesh_key(layout))
        if mesh is None:
            raise UnknownMesh(
                f"the state has a tensor of placements {layout.described}; no model here has that mesh"
            )
        return _made(
            part.local, mesh, [_placement(p) for p in layout.placements], layout.shape, layout.stride
        )


def _mesh_key(layout: Layout) -> tuple[Any, ...]:
    return layout.mesh_shape, layout.mesh_names, layout.ranks


def _placement(text: str) -> Any:
    from torch.distributed.tensor import placement_types

    numbers = [int(found) for found in re.findall(r"\d+", text)]
    if text == "R":
        return placement_types.Replicate()
    if text.startswith("_S"):
        return placement_types._StridedShard(numbers[0], split_factor=numbers[1])
    return placement_types.Shard(numbers[0])
