"""Plans the buckets: which gradients travel together, and the order in which buckets leave.

Owns the plan of buckets and their default sizes. Pure: knows shapes, not tensors, and no communicator.
Every rank computes the same plan from the same parameters, so the order is agreed without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bagua_core.model.sharded_tensors import WHOLE, Sharding

DEFAULT_BUCKET_CAP_MB = 25  # as torch's DDP, whose users have tuned around it
FIRST_BUCKET_BYTES = 1024 * 1024  # small, so that communication starts early in the backward


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """The properties of one parameter's gradient that planning uses. elements: of this worker's part of it."""

    elements: int
    dtype: torch.dtype
    device: torch.device
    sharding: Sharding = WHOLE

    @property
    def size_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """The plan of one bucket. members: places in registration order; offsets: first element of each member. dtype,
    device, sharding: of each member."""

    dtype: torch.dtype
    device: torch.device
    members: tuple[int, ...]
    offsets: tuple[int, ...]
    elements: int
    sharding: Sharding = WHOLE


def plan_buckets(
    gradients: Sequence[GradientSpec],
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * 1024 * 1024,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
) -> tuple[BucketPlan, ...]:
    """Plans the buckets, in the order in which they are launched.

    gradients: in registration order. Backward is taken to produce them in reverse, so the last ones fill the first
    bucket. A bucket has one dtype, device and sharding, and is closed once it holds its cap or more; a gradient is
    never split. Buckets of several dtypes leave in the order in which they fill. A gradient that several workers of a
    replica hold shares no bucket with one that differs between them: its sum must have the same bits on all of them.
    The bits depend on its place, since parts may differ in size, and in a compressed bucket on the values beside it.
    """
    if bucket_cap_bytes <= 0 or first_bucket_bytes <= 0:
        raise ValueError(f"bucket sizes must be positive: {bucket_cap_bytes}, {first_bucket_bytes} bytes")
    open_members: dict[tuple[torch.dtype, torch.device, Sharding], list[int]] = {}
    open_bytes: dict[tuple[torch.dtype, torch.device, Sharding], int] = {}
    caps: dict[tuple[torch.dtype, torch.device, Sharding], int] = {}
    closed: list[tuple[int, ...]] = []
    for index in reversed(range(len(gradients))):
        spec = gradients[index]
        key = (spec.dtype, spec.device, spec.sharding)
        open_members.setdefault(key, []).append(index)
        open_bytes[key] = open_bytes.get(key, 0) + spec.size_bytes
        if open_bytes[key] >= caps.get(key, min(first_bucket_bytes, bucket_cap_bytes)):
            closed.append(tuple(open_members.pop(key)))
            del open_bytes[key]
            caps[key] = bucket_cap_bytes
    # by the member that completes a bucket, the smallest: what is still open fills last
    leftovers = sorted((tuple(m) for m in open_members.values()), key=lambda members: -members[-1])
    ordered = sorted([*closed, *leftovers], key=lambda members: -members[-1])
    return tuple(_bucket(members, gradients) for members in ordered)


def carries_tail(bucket: BucketPlan) -> bool:
    """Tells whether a few more fp32 numbers can ride at the end of this bucket, readable without a device."""
    return bucket.dtype == torch.float32 and bucket.device.type == "cpu"


def _bucket(members: tuple[int, ...], gradients: Sequence[GradientSpec]) -> BucketPlan:
    offsets: list[int] = []
    elements = 0
    for index in members:
        offsets.append(elements)
        elements += gradients[index].elements
    first = gradients[members[0]]
    return BucketPlan(first.dtype, first.device, members, tuple(offsets), elements, first.sharding)
