"""Checks what a wrapped model does in a deterministic job, and refuses what would depend on the number of workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bagua_core.algorithms import Algorithm
from bagua_core.communication.step_interface import MicroBatch, StepPlan
from bagua_core.errors import NotDeterministicError
from bagua_core.model.shard_buffers import ShardBuffers


class ModelOfShards:
    """Checks one wrapped model of a deterministic job. Raises NotDeterministicError for an algorithm or a layer that
    has no fixed order."""

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], algorithm: Algorithm
    ) -> None:
        if not algorithm.has_fixed_order:
            raise NotDeterministicError(
                f"algorithm {algorithm.described!r} does not sum gradients in an order that is independent "
                "of the number "
                'of workers; a deterministic job needs algorithm="gradient_allreduce" with average=True'
            )
        self.buffers = ShardBuffers(module)
        self._optimizers = optimizers
        self._began: tuple[StepPlan, MicroBatch, list[float]] | None = None

    def check_rates(self, plan: StepPlan, micro_batch: MicroBatch) -> None:
        """Checks, as a forward begins, that learning rates do not change between two shards of a step. A scheduler that
        is not the job's would step once a shard, and so more often on a worker with more shards. Raises
        NotDeterministicError."""
        began = self._began
        if began is not None and began[1] is micro_batch:
            return
        rates = [float(group["lr"]) for o in self._optimizers for group in o.param_groups if "lr" in group]
        if began is None or began[0] != plan or micro_batch.shard is None or began[1].last:
            self._began = plan, micro_batch, rates
            return
        if rates != began[2]:
            raise NotDeterministicError(
                f"the learning rate changed from {began[2]} to {rates} between two shards of step "
                f"{plan.step}; what a loop "
                "does once a step it must not do once a shard: pass the scheduler to bagua.register_state()"
            )
        self._began = plan, micro_batch, rates

    @staticmethod
    def refuse_no_sync() -> None:
        raise NotDeterministicError(
            "no_sync() adds gradients of several batches of the loader, which are shards in a deterministic job; leave "
            "it out, and give the loader a larger global_batch_size"
        )
