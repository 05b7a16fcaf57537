"""Makes an algorithm of one function: a communication hook, in the form of torch's DistributedDataParallel.

torch's own hooks work unchanged: `Hook(powerSGD_hook, PowerSGDState(None, ...))`, `Hook(fp16_compress_hook)`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from bagua_core.algorithms.algorithm import Algorithm, Attachment
from bagua_core.algorithms.hook_state import HookState
from bagua_core.communication.communicator import Communicator, Pending
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.hook_group import HookError, HookGroup
from bagua_core.communication.reduction.operation_queue import OperationQueue, operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import StepEngine

HookFunction = Callable[[Any, Any], Any]


class HookBucket:
    """A bucket of gradients, with the methods of torch.distributed.GradBucket.

    `buffer()` is flat. Its mean over the workers is the job's gradient, each worker's share of the samples included.
    """

    def __init__(self, bucket: Bucket, number: int, is_last: bool) -> None:
        self._buffer = bucket.flat[: bucket.plan.elements]
        self._gradients, self._parameters = list(bucket.views), list(bucket.parameters)
        self._number, self._is_last = number, is_last

    def buffer(self) -> torch.Tensor:
        """Returns the gradients as one tensor, [elements], in the parameters' dtype."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer.copy_(buffer)

    def gradients(self) -> list[torch.Tensor]:
        """Returns views of the buffer, in the shapes of `parameters()`."""
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._number

    def is_last(self) -> bool:
        """Tells whether the bucket is the last one of the step."""
        return self._is_last


class Hook(Algorithm):
    """Sets gradients to the result of `function(state, bucket)`: a tensor like `bucket.buffer()`, or a future of one.

    function: as torch.nn.parallel.DistributedDataParallel.register_comm_hook takes it. It runs for each HookBucket,
    beside the script's thread and in the same order on all workers. It must return the same bits on all of them.
    state: its first argument. Its `process_group` is set to the job's group; without a state the group itself is the
    argument. Its fields belong to the job's state: a failed step leaves them as they were, a joiner and a checkpoint
    get them. They hold numbers, strings, tensors, containers of these, or numpy's RandomState.
    local: fields that are a worker's own, such as the error feedback of PowerSGD. A worker that copies the state from
    another begins with their first values.

    In a step in which a worker copies the state, gradients are averaged without the hook.
    Raises HookError (at the step) for what a hook can't do here.
    """

    name = "hook"

    def __init__(
        self, function: HookFunction, state: Any = None, *, local: Sequence[str] = ("error_dict",)
    ) -> None:
        self._function = function
        self._state = None if state is None else HookState(state, tuple(local))
        # of its registered state; workers make their hooks in one order
        self._name = f"hook {next(_numbers)}"
        self._serves: weakref.ref[Reducer] | None = None

    @property
    def described(self) -> str:
        function = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return (
            f"{self.name}({function})"
            if self._state is None
            else f"{self.name}({function}, {self._state.described})"
        )

    def attach(self, attachment: Attachment) -> Exchange:
        """Begins to act on the gradients. Raises ValueError if the hook's state serves another model."""
        engine = attachment.engine
        if self._state is not None:
            served = None if self._serves is None else self._serves()
            if served is not None and not served.is_closed:
                raise ValueError("a hook's state serves one model; make another Hook with a state of its own")
            engine.register_state(self._name, self._state)
        operation = HookOperation(operation_queue_of(engine), engine, self._function, self._state)
        reducer = Reducer(
            attachment.parameters,
            engine,
            attachment.bucket_cap_bytes,
            operation=operation,
            find_unused_parameters=attachment.find_unused_parameters,
        )
        operation.buckets = len(reducer.buckets_of_parameters())
        self._serves = weakref.ref(reducer)
        return reducer


_numbers = itertools.count()


class HookOperation(BucketOperation):
    acts_alone = True

    def __init__(
        self,
        operation_queue: OperationQueue,
        engine: StepEngine,
        function: HookFunction,
        state: HookState | None,
    ) -> None:
        self._operations, self._engine = operation_queue, engine
        self._function, self._state = function, state
        self.buckets = 0

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if communicator is not None and self._engine.plan.healing:
            job = _sum(communicator, bucket.reducible)  # one that copies the state does not have the hook's
            return self._operations.launch(communicator, job, (bucket.flat,))
        group = HookGroup(communicator)
        state: Any = group if self._state is None else self._state.of_step()
        job = self._run(group, state, HookBucket(bucket, number, number == self.buckets - 1))
        if communicator is None:
            for pending in job:
                pending.wait()
            return DonePending()
        return self._operations.launch(communicator, job, (bucket.flat,))

    def reduced(self) -> None:
        if self._state is not None:
            self._state.reduced()

    def failed(self) -> None:
        self._operations.flush()
        if self._state is not None:
            self._state.failed()

    def _run(self, group: HookGroup, state: Any, bucket: HookBucket) -> Generator[Pending, None, None]:
        """Calls the hook for `bucket` and writes what it returns to the buffer. Runs in the operation queue's
        thread."""
        buffer = bucket.buffer().mul_(group.size())  # it held this worker's part of a sum
        try:
            _lend(group, state)
            with torch.no_grad():
                result = self._function(state, bucket)
            future = result if isinstance(result, torch._C.Future) else None
            for pending in group.settle(future):
                yield pending
                _lend(group, state)  # a callback follows, and other buckets have run meanwhile
            value = result if future is None else future.wait()
        except Exception as error:
            if group.failure is not None:  # met by a callback, out of which torch makes another error
                raise group.failure from error
            raise
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.numel() != buffer.numel():
            raise HookError(
                f"a hook returns a tensor like bucket.buffer(), or a future of one, not {value!r:.200}"
            )
        if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
            buffer.copy_(value.reshape(-1))


def _lend(group: HookGroup, state: Any) -> None:
    """Makes `group` the one of the state, which all buckets of a step share."""
    if state is not group:
        state.process_group = group


def _sum(communicator: Communicator, tensor: torch.Tensor) -> Generator[Pending, None, None]:
    yield communicator.allreduce(tensor)
