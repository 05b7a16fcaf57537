"""Collectives over values of the workers, for every integration: a mean, a sum, and gathers of tensors of unequal sizes
and of objects.

A joiner has no value in its first step. is_filler: this worker's value comes from fillers, and is left out too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

import bagua_core as bagua
from bagua_core.collectives import ask
from bagua_core.elastic.script_collectives.requests import AllgatherRows
from bagua_core.elastic.state import state_codec


def mean(tensor: torch.Tensor, *, is_filler: bool = False) -> torch.Tensor:
    """Returns the mean over the workers with a value; 0 if none has one."""
    values = tensor if tensor.is_floating_point() else tensor.float()
    counted = torch.cat([values.flatten(), values.new_ones(1)])
    summed = bagua.allreduce(torch.zeros_like(counted) if is_filler else counted)
    return (summed[:-1] / summed[-1].clamp(min=1)).reshape(tensor.shape)


def total(tensor: torch.Tensor, *, is_filler: bool = False) -> torch.Tensor:
    """Returns the sum over the workers with a value; 0 if none has one."""
    return bagua.allreduce(torch.zeros_like(tensor) if is_filler else tensor)


def gather_unequal(tensor: torch.Tensor, *, is_filler: bool = False) -> list[torch.Tensor]:
    """Returns the tensors of workers with a value, by rank. Their shapes may differ in size, not in the number of
    dimensions, and empty ones are left out. If there are fillers only, all of them: a script may expect a value."""
    flat = tensor.reshape(1) if tensor.dim() == 0 else tensor
    shapes, rows = _shapes_and_rows(flat, is_filler)
    # Members changed between the two: a worker was lost, which all that are left see; or the job went on without this
    # worker, which is alone then. Those that see it do both again.
    while len(rows) != len(shapes):
        shapes, rows = _shapes_and_rows(flat, is_filler)
    samples: list[torch.Tensor] = []
    fillers: list[torch.Tensor] = []
    for row, sizes in zip(rows, shapes.tolist(), strict=True):
        shape = _sizes(sizes)
        if shape[0]:
            part = row[: math.prod(shape)].reshape(shape)
            (samples if shape == sizes else fillers).append(part)
    found = samples or fillers or [flat[:0]]
    return [part.reshape(()) if tensor.dim() == 0 and len(part) else part for part in found]


def gather_objects(objects: Sequence[Any], *, is_filler: bool = False) -> list[Any]:
    """Returns the objects of workers with a value, by rank, as copies; tensors among them on the CPU. Numbers of
    objects may differ. If there are fillers only, those of all of them. bagua.broadcast_object says what an object may
    be.

    Raises CannotTravel, before any peer is asked.
    """
    payload = state_codec.to_bytes([is_filler, list(objects)])
    # one collective: in a step that fails the result is this worker's payload several times, each of them whole
    parts = state_codec.from_bytes(ask(AllgatherRows(payload))[0])
    has_samples = not all(of_fillers for of_fillers, _ in parts)
    return [item for of_fillers, items in parts if not (of_fillers and has_samples) for item in items]


def _sizes(sizes: list[int]) -> list[int]:
    """Returns the shape, whose sizes travel inverted if the values are of fillers."""
    return [~size if size < 0 else size for size in sizes]


def _shapes_and_rows(flat: torch.Tensor, is_filler: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers every worker's shape, as it travels, and its values, padded to the longest."""
    own = torch.tensor(flat.shape, dtype=torch.int64, device="cpu")
    shapes = bagua.allgather(~own if is_filler else own)
    padded = flat.new_zeros(max(math.prod(_sizes(sizes)) for sizes in shapes.tolist()))
    padded[: flat.numel()] = flat.flatten()[: len(padded)]  # a joiner's own size is not in it
    return shapes, bagua.allgather(padded)
