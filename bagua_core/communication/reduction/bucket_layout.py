"""Keeps a reducer's buckets: which parameters have a place, where it is, and which buckets all ranks are known to have.

A layout begins with the parameters that the model was wrapped with. Further parameters get buckets of their own behind
the others; these are late until all ranks are known to have them. Every rank makes the same changes, so layouts agree
without a message. Knows nothing of gradients' weights, nor of when buckets leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bagua_core.communication.reduction.bucket_buffer import TAIL_ELEMENTS, Bucket
from bagua_core.communication.reduction.buckets import GradientSpec, carries_tail, plan_buckets
from bagua_core.model.sharded_tensors import is_sharded, like, local, sharding_of


class BucketLayout:
    """The places of a reducer's parameters in its buckets. parameters, views, gradients, bucket_of: by index. A view is
    the parameter's part of its bucket. A gradient is what .grad is when it lies there: the view itself, or a DTensor of
    it for a parameter that is one. buckets: in launch order. index_of: by the parameter's id."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_cap_bytes: int,
        first_bucket_bytes: int,
        tail_rides: bool,
        replica_size: int = 1,
    ) -> None:
        """Lays out the buckets. tail_rides: whether the tail is on the last bucket, if that can carry it. replica_size:
        the number of workers that hold one copy of the model together."""
        self._attached = list(parameters)
        self.has_shards = any(is_sharded(p) for p in parameters)
        self._bucket_cap_bytes = bucket_cap_bytes
        self._first_bucket_bytes = first_bucket_bytes
        self._tail_rides = tail_rides
        self._replica_size = replica_size
        self.version = 0
        """Grows when parameters get or lose their places."""
        self.parameters: list[torch.nn.Parameter] = []
        self.views: list[torch.Tensor] = []
        self.gradients: list[torch.Tensor] = []
        self.lay_out(self._attached)

    # -- changes, between steps

    def lay_out(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Makes buckets for these parameters alone. Gradients that lie in buckets move with them."""
        moving = [(p, view) for p, view, gradient in self._placed() if p.grad is gradient]
        self.parameters = []
        self.buckets: list[Bucket] = []
        self._append(parameters, self._tail_rides)
        self.settled = len(self.buckets)
        """Buckets that all ranks are known to have; those behind them are late."""
        self.is_compact = True
        """No parameter has got its place later than the others."""
        self._is_attached = len(parameters) == len(self._attached) and all(
            a is b for a, b in zip(parameters, self._attached, strict=True)
        )
        last = self.buckets[-1]
        self._tail_bucket = None if last.tail is None else last
        self.lone_tail = _new_tail() if last.tail is None else None
        """The tail, if no bucket carries it."""
        for parameter, view in moving:
            index = self.index_of.get(id(parameter))
            if index is not None:
                self.views[index].copy_(view)
                parameter.grad = self.gradients[index]

    def _placed(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, torch.Tensor]]:
        return zip(self.parameters, self.views, self.gradients, strict=True)

    def retune(
        self,
        parameters: Sequence[torch.nn.Parameter],
        bucket_cap_bytes: int,
        first_bucket_bytes: int,
        tail_rides: bool,
    ) -> None:
        """Lays out buckets of other sizes, with the parameters of the beginning in another order. parameters: the same
        ones; the last ones fill the first bucket."""
        assert self.is_attached(parameters)
        self._attached = list(parameters)
        self._bucket_cap_bytes, self._first_bucket_bytes = bucket_cap_bytes, first_bucket_bytes
        self._tail_rides = tail_rides
        self.lay_out(self._attached)

    def reset(self) -> bool:
        """Returns to the layout of the beginning; returns whether that is a change."""
        if self._is_attached:
            return False
        self.lay_out(self._attached)
        return True

    def append(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Adds late buckets for parameters that have no place yet."""
        self._append(parameters, with_tail=False)
        self.is_compact = self._is_attached = False

    def settle(self) -> None:
        """Notes that all ranks have the late buckets too."""
        self.settled = len(self.buckets)

    def renew(self) -> None:
        """Gives all buckets new memory, zero."""
        if self.lone_tail is not None:
            self.lone_tail = _new_tail()
        for bucket in self.buckets:
            bucket.renew()
        self._collect_views()

    # -- questions

    @property
    def tail(self) -> torch.Tensor:
        tail = self.lone_tail if self._tail_bucket is None else self._tail_bucket.tail
        assert tail is not None
        return tail

    @property
    def settled_parameters(self) -> int:
        """The number of parameters, the first ones by index, that lie in settled buckets."""
        return len(self.parameters) - sum(len(b.plan.members) for b in self.buckets[self.settled :])

    def is_attached(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Tells whether these are the parameters of the beginning, in any order."""
        return {id(p) for p in parameters} == {id(p) for p in self._attached}

    def _append(self, parameters: Sequence[torch.nn.Parameter], with_tail: bool) -> None:
        begin = len(self.parameters)
        self.parameters = [*self.parameters, *parameters]
        specs = [GradientSpec(local(p).numel(), p.dtype, p.device, sharding_of(p)) for p in parameters]
        plans = plan_buckets(specs, self._bucket_cap_bytes, self._first_bucket_bytes)
        for plan in plans:
            moved = replace(plan, members=tuple(begin + member for member in plan.members))
            # Which bucket is the last may differ between the workers of a replica, and the bits of a sum depend on the
            # length of its bucket: one that several of them hold has no tail.
            is_own = plan.sharding.gives_each_its_own(self._replica_size)
            rides = with_tail and plan is plans[-1] and carries_tail(plan) and is_own
            self.buckets.append(Bucket(moved, self.parameters, rides))
        self.index_of = {id(p): index for index, p in enumerate(self.parameters)}
        self.bucket_of = [0] * len(self.parameters)
        self.views = [self.buckets[0].flat] * len(self.parameters)
        self.gradients = list(self.views)
        for number, bucket in enumerate(self.buckets):
            for index in bucket.plan.members:
                self.bucket_of[index] = number
        self._collect_views()
        self.version += 1

    def _collect_views(self) -> None:
        for bucket in self.buckets:
            for index, view in zip(bucket.plan.members, bucket.views, strict=True):
                self.views[index] = view
        self.gradients[:] = [like(p, v) for v, p in zip(self.views, self.parameters, strict=True)]


def _new_tail() -> torch.Tensor:
    return torch.zeros(TAIL_ELEMENTS, dtype=torch.float32, device="cpu")
