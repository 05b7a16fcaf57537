"""Runs an algorithm that a script has written, by calling its hooks at their moments of a step.

Owns the way from an AlgorithmImpl to an exchange of the core: gradients fill the reducer's buckets, and when the
backward is through the operations that the script has appended run one after the other, in the script's thread and in
one order on all workers. Nothing overlaps with the backward; an algorithm that needs that is written for the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from bagua_core.algorithms import Algorithm as CoreAlgorithm
from bagua_core.algorithms import Attachment
from bagua_core.communication.communicator import CollectiveAborted, Communicator, Lane, Pending
from bagua_core.communication.pending import DonePending
from bagua_core.communication.reduction.bucket_buffer import Bucket
from bagua_core.communication.reduction.bucket_operation import BucketOperation
from bagua_core.communication.reduction.exchange import Exchange
from bagua_core.communication.reduction.operation_queue import operation_queue_of
from bagua_core.communication.reduction.reducer import Reducer
from bagua_core.communication.step_interface import StepEngine
from bagua_core.torch_api.algorithms.base import (
    Algorithm,
    ScriptModel,
    is_own,
)
from bagua_core.torch_api.bucket import BaguaBucket, Turn


def prepared(
    algorithm: Algorithm, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[ScriptModel | None, CoreAlgorithm]:
    """Returns the core's algorithm for a declaration; for a script's own also the model as its hooks see it."""
    built_in = None if is_own(algorithm) else algorithm.core()
    if built_in is not None:
        return None, built_in
    model = ScriptModel(module, optimizers, algorithm)
    kind = Own if algorithm.equal_states else OwnUnequal
    return model, kind(model, type(algorithm).__qualname__)


class Own(CoreAlgorithm):
    name = "own"

    def __init__(self, model: ScriptModel, called: str) -> None:
        self._model = model
        self._called = called

    @property
    def lanes(self) -> frozenset[Lane]:
        return frozenset({Lane.NODE, Lane.LEADERS})  # what operations need may change with need_reset

    @property
    def described(self) -> str:
        return f"{self.name}({self._called})"

    def attach(self, attachment: Attachment) -> Exchange:
        return OwnExchange(attachment, self._model)


class OwnUnequal(Own):
    equal_states = False


class OwnExchange(Reducer):
    def __init__(self, attachment: Attachment, model: ScriptModel) -> None:
        operations = Operations(attachment.engine, model)
        super().__init__(
            attachment.parameters,
            attachment.engine,
            attachment.bucket_cap_bytes,
            operation=operations,
            find_unused_parameters=attachment.find_unused_parameters,
        )
        operation_queue = operation_queue_of(attachment.engine)
        model.bagua_buckets = [
            BaguaBucket(str(number), parameters, bucket, operation_queue)
            for number, (bucket, parameters) in enumerate(self.buckets_of_parameters())
        ]
        model.init_operations()
        self._model = model
        self._asked = False  # in this step

    def forward_begins(self) -> None:
        if not self._asked:
            self._asked = True
            if self._model.impl.need_reset():
                self._model.init_operations()

    def step_committed(self) -> None:
        super().step_committed()
        self._asked = False

    def step_rolled_back(self) -> None:
        super().step_rolled_back()
        self._asked = False


class Operations(BucketOperation):
    """Runs all operations that a script has appended, bucket by bucket."""

    acts_alone = True

    def __init__(self, engine: StepEngine, model: ScriptModel) -> None:
        self._engine = engine
        self._model = model

    def launch(
        self, communicator: Communicator | None, bucket: Bucket, number: int, weight: float
    ) -> Pending:
        if communicator is None:
            self._run(None, bucket, number, weight, lambda _: None)
            return DonePending()
        return _Later(lambda wait: self._run(communicator, bucket, number, weight, wait))

    def _run(
        self,
        communicator: Communicator | None,
        bucket: Bucket,
        number: int,
        weight: float,
        wait: Callable[[Pending], None],
    ) -> None:
        if weight not in (0.0, 1.0):
            bucket.flat.div_(weight)
        alone = communicator is None or communicator.world_size == 1
        turn = Turn(bucket, number, None if alone else communicator, weight, wait)
        for operation in self._model.bagua_buckets[number].operations:
            operation.run(turn)
            if self._engine.step_failed:  # a collective that the script called has failed and told the engine
                raise CollectiveAborted("a collective of the script's own algorithm failed")

    def reduced(self) -> None:
        for bucket in self._model.bagua_buckets:
            for operation in bucket.operations:
                operation.reduced()
        self._model.post_backward_hook()

    def failed(self) -> None:
        for bucket in self._model.bagua_buckets:
            for operation in bucket.operations:
                operation.failed()


class _Later(Pending):
    """Work that is done when it is waited for."""

    def __init__(self, work: Callable[[Callable[[Pending], None]], None]) -> None:
        self._work: Callable[[Callable[[Pending], None]], None] | None = work

    def wait(self, stalled: Callable[[float], None] | None = None, stall_after_s: float = 0.5) -> None:
        work, self._work = self._work, None
        if work is not None:
            work(lambda pending: pending.wait(stalled, stall_after_s))

    def is_done(self) -> bool:
        return self._work is None
