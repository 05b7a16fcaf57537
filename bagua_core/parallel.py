"""What a script wraps its model in: the counterpart of torch's DistributedDataParallel.

Owns the wiring of one model: its algorithm's reducer, its buffers, the gates on its optimizers. When a step
begins, commits or fails is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bagua_core.algorithms import Algorithm, Attachment, find_algorithm
from bagua_core.communication.buckets import DEFAULT_BUCKET_CAP_MB
from bagua_core.communication.buffer_broadcast import broadcast_buffers as share_buffers
from bagua_core.communication.communicator import CollectiveFailed, Lane
from bagua_core.communication.reducer import SparseGradientError
from bagua_core.elastic.step_interface import StepEngine
from bagua_core.module_buffers import ModuleBuffers
from bagua_core.optimizer_gate import gate_optimizer
from bagua_core.sync_batchnorm import SyncBatchNorm


class DistributedDataParallel(nn.Module):
    """`module`, trained by all workers of the job together.

    optimizers: those that step on its parameters; their step() does nothing when the job's step failed.
    broadcast_buffers: rank 0's buffers are used by all from the start of each training forward.
    find_unused_parameters: one that took part on no rank keeps a .grad of None instead of zero, for optimizers that
    move a parameter whose gradient is zero (weight decay, momentum).
    engine: this process's if None.
    Raises ValueError (nothing to train, unknown algorithm) and SparseGradientError.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: str | Algorithm = "gradient_allreduce",
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        engine: StepEngine | None = None,
    ) -> None:
        super().__init__()
        _check_trainable(module)
        chosen = find_algorithm(algorithm)
        if engine is None:
            from bagua_core.elastic import runtime  # late: a script may choose its engine before there is any

            engine = runtime.engine()
        self.module = module
        self.optimizers = list(optimizers)
        self.algorithm = chosen
        self.broadcast_buffers = broadcast_buffers
        self._module_buffers = ModuleBuffers(module)
        self.require_backward_grad_sync = True
        self._engine = engine
        parameters = {id(p): p for p in module.parameters() if p.requires_grad}
        if not parameters:
            raise ValueError("no parameter requires a gradient; there is nothing to train")
        self._exchange = chosen.attach(
            Attachment(
                tuple(parameters.values()),
                self.optimizers,
                engine,
                int(bucket_cap_mb * 1024 * 1024),
                find_unused_parameters,
            )
        )
        for optimizer in self.optimizers:
            gate_optimizer(optimizer, engine)
        engine.attach_model(self)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled():
            self._engine.forward_begins()
            # decided here and not in backward, as torch does: no_sync must cover the forward
            self._exchange.synced = self.require_backward_grad_sync
            if self._engine.in_step and not self._engine.step_failed:
                self._exchange.forward_begins()
            if self.training and self.broadcast_buffers and self.require_backward_grad_sync:
                self._broadcast_buffers()
        return self.module(*inputs, **keywords)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards in here stay local and are reduced with the next backward outside."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def is_unfinished(self) -> bool:
        """A backward began and never ended, so peers may wait for buckets of it."""
        return self._exchange.is_unfinished

    @property
    def algorithm_name(self) -> str:
        """See step_interface.Model."""
        return self.algorithm.described

    @property
    def equal_states(self) -> bool:
        """See step_interface.Model."""
        return self.algorithm.equal_states

    @property
    def lanes(self) -> frozenset[Lane]:
        """See step_interface.Model."""
        own = {Lane.STATISTICS} if any(isinstance(m, SyncBatchNorm) for m in self.module.modules()) else set()
        return self.algorithm.lanes | own

    def travelling(self) -> Mapping[str, torch.Tensor]:
        """See step_interface.Model."""
        return self._exchange.travelling()

    def step_committed(self) -> None:
        """See step_interface.Model."""
        self._exchange.step_committed()

    def finish(self, average: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """See step_interface.Model."""
        self._exchange.finish(average)

    def step_rolled_back(self) -> None:
        """See step_interface.Model."""
        self._exchange.step_rolled_back()

    def communicator_changed(self) -> None:
        """See step_interface.Model."""
        self._module_buffers.refresh()
        self._exchange.communicator_changed()

    def _broadcast_buffers(self) -> None:
        engine = self._engine
        if not engine.in_step or engine.step_failed:
            return
        communicator = engine.communicator()
        buffers = self._module_buffers.current()
        if communicator is None or not buffers:
            return
        try:
            share_buffers(buffers, communicator, engine.wait)
        except CollectiveFailed as error:
            engine.broadcast_failed(error)  # if the step is lost, the script's forward goes on all the same


def _check_trainable(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if getattr(part, "sparse", False) and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
            raise SparseGradientError(
                f"{name or type(part).__name__} has sparse=True; sparse gradients are not supported, "
                "use sparse=False"
            )
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run the model once before it is wrapped")
