"""When is a gradient ready, what does it count, and when has the whole job's gradient arrived?

Owns the hooks on the parameters, the buckets and the order in which they leave. Knows the engine only as
StepEngine. Invariants: a bucket holds weight times this rank's gradient, and the weights of all ranks sum to
1 over a step; every rank launches the same buckets in the same order; a failed reduction leaves only zeros
behind, in memory that no abandoned operation can reach.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bagua_core.communication.bucket_buffer import PAIR_ELEMENTS, Bucket
from bagua_core.communication.bucket_operation import BucketOperation, Sum
from bagua_core.communication.buckets import (
    DEFAULT_BUCKET_CAP_MB,
    FIRST_BUCKET_BYTES,
    GradientSpec,
    carries_pair,
    plan_buckets,
)
from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending, ReduceOp
from bagua_core.communication.exchange import Exchange
from bagua_core.elastic.step_interface import MicroBatch, StepEngine


class SparseGradientError(TypeError):
    """A parameter has a sparse gradient, which has no place in a flat bucket."""


class NestedBackwardError(RuntimeError):
    """Gradients of one step came from a backward inside another backward."""


class _End:
    """What autograd calls at the end of a backward. Only autograd holds it, so it lives as long as that."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class Reducer(Exchange):
    """Averages gradients over the job within backward, weighted by samples.

    After the backward of a step's last micro-batch every .grad is the job's mean, or whatever `operation` makes of
    the ranks' contributions. Before that the contributions gather in the buckets, and .grad is zero, so that the
    script's own zero_grad and clipping do no harm. A parameter that took no part counts as zero; with
    find_unused_parameters one that took part on no rank keeps a .grad of None, so that no optimizer touches it, which
    costs one small message a step. average False: the mean times the number of workers that take part, which for
    equal shares is the sum of their gradients. Close it to remove its hooks.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        engine: StepEngine,
        bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_MB * 1024 * 1024,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        operation: BucketOperation | None = None,
        find_unused_parameters: bool = False,
        average: bool = True,
    ) -> None:
        unique = {id(p): p for p in parameters if p.requires_grad}
        self._parameters = list(unique.values())
        if not self._parameters:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        self._engine = engine
        self._operation = operation or Sum()
        self._finds_unused = find_unused_parameters
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        specs = [GradientSpec(p.numel(), p.dtype, p.device) for p in self._parameters]
        plans = plan_buckets(specs, bucket_cap_bytes, first_bucket_bytes)
        rides = carries_pair(plans[-1]) and self._operation.carries_pair
        self._buckets = [
            Bucket(plan, self._parameters, with_pair=rides and plan is plans[-1]) for plan in plans
        ]
        self._pair_written = True  # whether the pair holds anything but zeros
        self._lone_pair = None if rides else torch.zeros(PAIR_ELEMENTS)
        self._bucket_of = [0] * len(self._parameters)
        self._views: list[torch.Tensor] = [self._buckets[0].flat] * len(self._parameters)
        for number, bucket in enumerate(self._buckets):
            for index in bucket.plan.members:
                self._bucket_of[index] = number
        self._collect_views()

        self._lock = threading.RLock()  # parameters on several devices: backward runs in several threads
        self._task: int | None = None  # autograd's id of the backward under way
        self._end: weakref.ref[_End] | None = None
        self._communicator: Communicator | None = None
        self._micro_batch = MicroBatch(1.0, True)
        self._earlier_weight = 0.0  # of this step's micro-batches before the one under way
        self._skips = False
        self._next_bucket = 0
        self._ready = bytearray(len(self._parameters))
        # 1: the view already holds something that goes into the mean as it is, so contributions are added
        self._accumulated = bytearray(len(self._parameters))
        self._separates_mean = False
        self._average = average
        self._scale = 1.0  # of this step's contributions
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(self._hook(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self._parameters)
        ]
        if not average:  # what .grad still holds is scaled already
            self._separate_mean()

    @property
    def bucket_sizes_bytes(self) -> tuple[int, ...]:
        """Of the buckets in launch order, the switch pair included."""
        return tuple(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    @property
    def is_unfinished(self) -> bool:
        """A backward began and did not reach its end: it raised, or it runs now."""
        return self._task is not None

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def step_rolled_back(self) -> None:
        """The step did not happen: forget accumulations; .grad is the caller's to clear."""
        with self._lock:
            self._forget()

    def communicator_changed(self) -> None:
        """Nothing of the old communicator outlives this."""
        with self._lock:
            self._forget()
            self._communicator = None
            self._operation.communicator_changed()

    # -- during backward, called by autograd

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_accumulated(parameter: torch.Tensor) -> None:
            if not self.synced:
                return
            with self._lock:
                if torch.is_grad_enabled():  # backward(create_graph=True)
                    with torch.no_grad():
                        self._take(index, parameter)
                else:
                    self._take(index, parameter)

        return gradient_accumulated

    def _take(self, index: int, parameter: torch.Tensor) -> None:
        self._enter_backward()
        if self._skips:
            return
        if self._ready[index]:
            raise NestedBackwardError(
                "a parameter received a gradient twice in one backward; if activation checkpointing is used, "
                "pass use_reentrant=False"
            )
        self._contribute(index, parameter)
        self._ready[index] = 1
        number = self._bucket_of[index]
        bucket = self._buckets[number]
        bucket.missing -= 1
        if bucket.missing == 0 and number == self._next_bucket and self._micro_batch.last:
            self._launch_filled()

    def _enter_backward(self) -> None:
        """At the first gradient of a backward: what holds for all of it."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if self._task is not None:
            if self._end is not None and self._end() is not None:
                raise NestedBackwardError(
                    "a backward ran inside another one; if activation checkpointing is used, pass "
                    "use_reentrant=False"
                )
            self._give_up_unfinished()
        self._micro_batch = self._engine.micro_batch
        self._skips = self._engine.step_failed
        self._communicator = self._engine.communicator()
        self._scale = 1.0 if self._average else float(self._engine.plan.active_count)
        self._next_bucket = 0
        self._ready = bytearray(len(self._parameters))
        for bucket in self._buckets:
            bucket.rearm()
        end = _End(self._end_backward)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._end = weakref.ref(end)
        self._task = task

    def _contribute(self, index: int, parameter: torch.Tensor) -> None:
        """Put weight * .grad into the bucket. .grad None counts as zero."""
        gradient, view = parameter.grad, self._views[index]
        weight, last = self._micro_batch.weight * self._scale, self._micro_batch.last
        if gradient is not None and gradient.layout is not torch.strided:
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
        elif gradient is view:
            if weight != 1.0:
                view.mul_(weight)
        elif weight == 1.0 and last and self._communicator is None and not self._operation.acts_alone:
            return  # a world of one: .grad is the mean already
        else:
            torch.mul(gradient, weight, out=view)
        if last:
            if gradient is not view:
                parameter.grad = view
            return
        self._accumulated[index] = 1
        if gradient is view:
            parameter.grad = torch.zeros_like(view)
        elif gradient is not None:
            gradient.zero_()

    def _launch_filled(self) -> None:
        communicator = self._communicator
        if communicator is None and not self._operation.acts_alone:
            return
        buckets = self._buckets
        weight = self._earlier_weight + self._micro_batch.weight
        while self._next_bucket < len(buckets) and buckets[self._next_bucket].missing == 0:
            number, bucket = self._next_bucket, buckets[self._next_bucket]
            self._next_bucket += 1
            if bucket.pair is not None and communicator is not None:
                self._write_pair(bucket.pair)
            bucket.pending = self._operation.launch(communicator, bucket, number, weight)

    def _launch_small(self, communicator: Communicator) -> list[Pending]:
        """What goes beside the buckets. The pair is last: it says that all of the step succeeded here."""
        pendings: list[Pending] = []
        if self._finds_unused:
            pendings.append(communicator.allreduce(self._used, ReduceOp.MAX))
        if self._lone_pair is not None:
            self._write_pair(self._lone_pair)
            pendings.append(communicator.allreduce(self._lone_pair))
        return pendings

    def _note_used(self) -> None:
        """Before anything is filled in for those that took no part."""
        self._used.copy_(
            torch.tensor(
                [
                    self._ready[i] or self._accumulated[i] or p.grad is not None
                    for i, p in enumerate(self._parameters)
                ]
            )
        )

    def _write_pair(self, pair: torch.Tensor) -> None:
        v = self._engine.switch_value()
        if (
            v or self._pair_written
        ):  # in most steps it is zero before and after, and writing costs more than asking
            pair[0], pair[1] = v, v * v  # as it is: neither weighted nor averaged
        self._pair_written = True

    # -- the end of backward, called by autograd after the last gradient

    def _end_backward(self) -> None:
        with self._lock, torch.no_grad():
            if self._skips:
                self._zero_gradients()
            else:
                self._complete()
            self._task = None

    def _complete(self) -> None:
        last = self._micro_batch.last
        if last and self._finds_unused:
            self._note_used()
        for index, parameter in enumerate(self._parameters):
            if not self._ready[index]:
                if self._separates_mean:
                    self._set_mean_aside(index, parameter)
                if last or parameter.grad is not None:
                    self._contribute(index, parameter)
        if not last:
            self._earlier_weight += self._micro_batch.weight
            self._separate_mean()
            return
        for bucket in self._buckets:
            bucket.missing = 0
        try:
            pair = self._reduce_rest()
        except CollectiveFailed as error:
            self._retire_buckets()
            self._zero_gradients()
            self._engine.reduction_failed(error)
            return
        self._accumulated = bytearray(len(self._parameters))
        self._earlier_weight = 0.0
        self._engine.reduction_done(pair)
        if self._engine.step_failed:
            self._operation.failed()
            self._zero_gradients()
            return
        self._operation.reduced()
        if self._finds_unused:
            for index in (self._used == 0).nonzero().flatten().tolist():
                self._parameters[index].grad = None

    def _reduce_rest(self) -> tuple[float, float] | None:
        """Launch what is left and wait for everything. Returns the sums of the switch pair."""
        communicator = self._communicator
        self._launch_filled()
        if communicator is None:
            for bucket in self._buckets:
                bucket.pending = None
            return None
        small = self._launch_small(communicator) if self._operation.starts_at_once else None
        for bucket in self._buckets:
            assert bucket.pending is not None
            self._engine.wait(bucket.pending)
        self._operation.before_vote(communicator)
        for pending in self._launch_small(communicator) if small is None else small:
            self._engine.wait(pending)
        for bucket in self._buckets:
            bucket.pending = None
        pair = self._lone_pair if self._lone_pair is not None else self._buckets[-1].pair
        assert pair is not None
        total, squares = pair.tolist()
        self._pair_written = total != 0.0
        return total, squares

    # -- several backwards in a step of several micro-batches

    def _separate_mean(self) -> None:
        """From now on keep a mean that .grad still holds apart from what the next backward adds.

        With one micro-batch a step no such care is needed: a mean G that all ranks hold comes out of the
        reduction as G, for the weights sum to 1. The weights of a last micro-batch alone do not.
        """
        if self._separates_mean:
            return
        self._separates_mean = True
        self._hooks += [
            p.register_hook(self._before_accumulation(i))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self._parameters)
        ]

    def _before_accumulation(self, index: int) -> Callable[[torch.Tensor], None]:
        def gradient_computed(_: torch.Tensor) -> None:
            if not self.synced:
                return
            with self._lock:
                self._enter_backward()
                if not self._skips:
                    self._set_mean_aside(index, self._parameters[index])

        return gradient_computed

    def _set_mean_aside(self, index: int, parameter: torch.nn.Parameter) -> None:
        """A mean in .grad goes into the next one from one rank, unweighted; rank 0 always holds the state."""
        if parameter.grad is self._views[index]:
            parameter.grad = None
            communicator = self._communicator
            self._accumulated[index] = 1 if communicator is None or communicator.global_rank == 0 else 0

    # -- what did not happen

    def _give_up_unfinished(self) -> None:
        """The backward before raised half-way and the script went on; peers wait for the rest of it."""
        sent = sum(1 for b in self._buckets if b.pending is not None)
        self._forget()
        if sent:
            self._engine.reduction_failed(
                CollectiveFailed(f"a backward ended with an exception after it had sent {sent} buckets")
            )

    def _forget(self) -> None:
        self._task = None
        self._earlier_weight = 0.0
        self._accumulated = bytearray(len(self._parameters))
        if any(b.pending is not None for b in self._buckets):
            self._retire_buckets()
            self._zero_gradients()

    def _retire_buckets(self) -> None:
        """Operations that were given up may still write: into memory that nothing else uses any more."""
        self._operation.failed()
        self._used = torch.zeros_like(self._used)
        if self._lone_pair is not None:
            self._lone_pair = torch.zeros(PAIR_ELEMENTS)
        for bucket in self._buckets:
            bucket.renew()
        self._collect_views()

    def _collect_views(self) -> None:
        for bucket in self._buckets:
            for index, view in zip(bucket.plan.members, bucket.views, strict=True):
                self._views[index] = view

    def _zero_gradients(self) -> None:
        self._accumulated = bytearray(len(self._parameters))
        for bucket in self._buckets:
            bucket.flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
