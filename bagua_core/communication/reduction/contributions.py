"""Writes this rank's contributions to a reduction: what each gradient puts into its place in the buckets.

Knows nothing of when a bucket leaves; reducer.py builds on it. Invariants: a bucket holds weight times this rank's
gradient; a reduction that was given up leaves only zeros behind, in memory that no abandoned operation can reach.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_layout import BucketLayout
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.earlier_backwards import EarlierBackwards
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.errors import UserError
from bagua_core.model.optimizer_steps import OptimizerSteps
from bagua_core.model.sharded_tensors import like, local

_MULTIPLIED_ALIKE = (torch.float32, torch.float64)


class SparseGradientError(UserError, TypeError):
    """A parameter has a sparse gradient, which has no place in a flat bucket."""


class Contributions(Exchange):
    def __init__(self, layout: BucketLayout, operation: BucketOperation, steps: OptimizerSteps) -> None:
        self._layout = layout
        self._operation = operation
        self._frozen: list[torch.nn.Parameter] = []  # that have a place in a bucket and are not trained
        self._communicator: Communicator | None = None
        self._micro_batch = MicroBatch(1.0, True)
        self._weight = 0.0  # of this step's micro-batches so far that had a backward
        self._weighed: MicroBatch | None = None  # the newest of them
        self._earlier = EarlierBackwards(steps)  # of that micro-batch
        self._has_parts = False  # the buckets hold gradients of micro-batches before the step's last one
        self._factor = 0.0  # of the gradients of the backward under way
        self._factors: dict[torch.dtype, torch.Tensor] = {}
        """The same factor as tensors without dimensions: torch converts a number anew in each multiplication."""
        # by index: means that the script left in .grad and that are this rank's own
        self._own_means: dict[int, torch.Tensor] = {}
        self._take_over_layout()

    def buckets_of_parameters(self) -> list[tuple[Bucket, list[torch.nn.Parameter]]]:
        """Returns the buckets in launch order, each with the parameters whose gradients lie in it."""
        return [(b, [self._parameters[i] for i in b.plan.members]) for b in self._buckets]

    @property
    def layout_version(self) -> int:
        """The version of the layout; see Exchange."""
        return self._layout.version

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Tells whether the parameter has a place in the buckets; see Exchange."""
        return id(parameter) in self._index_of

    def put_gradient(self, parameter: torch.Tensor, value: torch.Tensor | None) -> None:
        """Makes `value` the .grad of `parameter`; see Exchange. The value lies in the bucket, where a mean that all
        ranks hold is recognized."""
        index = next((i for i, p in enumerate(self._parameters) if p is parameter), None)
        if value is None or index is None:
            super().put_gradient(parameter, value)
        else:
            self._views[index].copy_(local(value))
            parameter.grad = self._gradients[index]

    def _take_over_layout(self) -> None:
        """Keeps here what is read for each gradient of the layout. Called between steps."""
        layout = self._layout
        self._parameters, self._buckets, self._views = layout.parameters, layout.buckets, layout.views
        self._gradients = layout.gradients
        self._bucket_of, self._index_of = layout.bucket_of, layout.index_of
        count = len(self._parameters)
        self._used = torch.zeros(count, dtype=torch.uint8, device="cpu")
        self._ready = bytearray(count)
        # 1: the view already holds something that goes into the mean as it is, so contributions are added
        self._accumulated = bytearray(count)

    def _weigh(self, micro_batch: MicroBatch) -> None:
        """Adds the weight of a micro-batch whose backward begins. Each micro-batch counts once, whatever the number of
        its backwards."""
        self._micro_batch = micro_batch
        if micro_batch is not self._weighed:
            begins_step = self._weighed is None or self._weighed.last
            if begins_step:
                self._weight = 0.0
            self._earlier.micro_batch_begins(micro_batch, is_whole_step=begins_step and micro_batch.last)
            self._weight += micro_batch.weight
            self._weighed = micro_batch

    def _multiply_by(self, times: int) -> None:
        """Sets the factor of the gradients of the backward that begins: the micro-batch's weight, so many times."""
        factor = self._micro_batch.weight * times
        if factor != self._factor:
            self._factor = factor
            # the other types are not multiplied in their own precision
            self._factors = {t: torch.tensor(factor, dtype=t, device="cpu") for t in _MULTIPLIED_ALIKE}

    def _forget_parts(self) -> None:
        self._has_parts, self._weighed = False, None
        self._earlier.forget()
        self._accumulated = bytearray(len(self._parameters))
        self._own_means.clear()

    def _contribute(self, index: int, parameter: torch.Tensor) -> None:
        """Puts weight * .grad into the bucket. A .grad of None counts as zero."""
        gradient, view, place = parameter.grad, self._views[index], self._gradients[index]
        is_placed = gradient is place
        weight, last = self._factor, self._micro_batch.last
        if gradient is not None:
            if type(gradient) is not torch.Tensor:
                gradient = local(gradient)
            if gradient.layout is not torch.strided:
                raise SparseGradientError(
                    f"a parameter of shape {tuple(parameter.shape)} has a {gradient.layout} gradient; sparse "
                    "gradients are not supported, use dense ones (for embeddings: sparse=False)"
                )
        accumulated = self._accumulated[index]
        if gradient is None or weight == 0.0:
            # replaced, not multiplied: an empty mean is NaN, and NaN times 0 is NaN too
            if not accumulated:
                view.zero_()
        elif accumulated:
            view.add_(gradient, alpha=weight)
        elif is_placed:
            if weight != 1.0:
                view.mul_(weight)
        elif self._communicator is None and weight == 1.0 and last and not self._operation.acts_alone:
            return  # a world of one: .grad is the mean already
        else:
            torch.mul(gradient, self._factors.get(view.dtype, weight), out=view)
        if last:
            if not is_placed:
                parameter.grad = place
            return
        if weight != 0.0:
            self._accumulated[index] = 1
        if is_placed:
            parameter.grad = like(parameter, torch.zeros_like(view))
        elif gradient is not None:
            gradient.zero_()

    def _note_used(self) -> None:
        """Notes which parameters took part, before anything is filled in for the others."""
        self._used.copy_(
            torch.tensor(
                [self._took_part(i, p) for i, p in enumerate(self._parameters)],
                dtype=torch.uint8,
                device="cpu",
            )
        )

    def _took_part(self, index: int, parameter: torch.nn.Parameter) -> bool:
        """Tells whether a sample of this rank used the parameter in this step, or .grad holds a gradient from before.
        Fillers use nothing: an optimizer would move what no sample has used."""
        if self._accumulated[index] or index in self._own_means:
            return True
        if self._micro_batch.weight == 0.0:
            return not self._ready[index] and parameter.grad is self._gradients[index]
        return bool(self._ready[index]) or parameter.grad is not None

    def _set_mean_aside(self, index: int, parameter: torch.nn.Parameter) -> None:
        """Sets aside a mean that .grad still holds, so that it goes into the next mean from one rank, unweighted; rank
        0 always holds the state. Where each rank has a mean of its own, it is added to that rank's next one."""
        if parameter.grad is not self._gradients[index]:
            return
        parameter.grad = None
        communicator = self._communicator
        if communicator is None or not self._operation.keeps_own:
            self._accumulated[index] = 1 if communicator is None or communicator.global_rank == 0 else 0
        else:
            self._own_means[index] = self._views[index].clone()

    def _discard(self, indices: Iterable[int]) -> None:
        """Gives these parameters a .grad of None. What the operation left for them in the buckets is not used."""
        discarded = set(indices)
        if not discarded:
            return
        for number in sorted({self._bucket_of[index] for index in discarded}):
            plan = self._buckets[number].plan
            elements = [
                slice(begin, begin + self._views[index].numel())
                for index, begin in zip(plan.members, plan.offsets, strict=True)
                if index in discarded
            ]
            self._operation.discard(number, elements)
        for index in discarded:
            self._parameters[index].grad = None

    def _add_own(self) -> None:
        """Adds this rank's own means to the next means, which the buckets hold."""
        for index, mean in self._own_means.items():
            self._views[index].add_(mean)
        self._own_means.clear()

    def _retire_buckets(self) -> None:
        """Gives the buckets new memory: operations that were given up may still write into the old one, which nothing
        else uses."""
        self._operation.failed()
        self._used = torch.zeros_like(self._used)
        self._layout.renew()

    def _zero_gradients(self) -> None:
        self._accumulated = bytearray(len(self._parameters))
        for bucket in self._buckets:
            bucket.flat.zero_()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        for parameter in self._frozen:
            parameter.grad = None
