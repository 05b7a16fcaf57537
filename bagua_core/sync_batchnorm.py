"""Normalizes over the global batch: statistics of all workers' samples, in forward and in backward.

Owns one layer's arithmetic and its two exchanges, on a lane of their own so that they never mix with gradients under
way. The result is what one process would compute on the whole global batch, whatever the workers' shares: statistics
count samples, and gradients are weighted as DistributedDataParallel weights them. A worker that heals contributes
nothing. If a peer is lost in between, the step fails and the layer goes on with what it has, for the script's backward
to end.

On a GPU the host waits neither for a layer's exchanges nor for its counts: both stay on the device, and the vote that
decides the step comes after them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Lane, Pending, ReduceOp
from bagua_core.communication.devices.device_wait import Followed
from bagua_core.communication.step_interface import StepEngine


class SyncBatchNorm(_BatchNorm):
    """Normalizes as torch.nn.BatchNorm1d, 2d and 3d do, in steps over all workers' samples; inputs [samples, features,
    ...]. Outside steps and in evaluation it is the same as these.

    In a step a training forward under torch.no_grad() counts all workers' samples too, so all workers must run it.
    The model must be wrapped in bagua.DistributedDataParallel. Parameters, buffers and state_dict are BatchNorm's.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        engine: StepEngine | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self._engine = engine

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input [samples, features, ...], not of {input.dim()} dimensions")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input: [samples, channels, ...], in its shape and dtype."""
        self._check_input_dim(input)
        peers = self._peers() if self.training else None
        if peers is None:
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, peers)  # type: ignore[no-untyped-call]
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._follow(mean, variance, count)
        result: torch.Tensor = output
        return result

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Updates the running statistics. count: 0 if no worker has samples, which changes nothing."""
        assert self.running_mean is not None and self.running_var is not None
        is_counted = count > 0
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(is_counted)
        unbiased = variance * (count / (count - 1).clamp_(min=1))
        for running, found in ((self.running_mean, mean), (self.running_var, unbiased)):
            factor: float | torch.Tensor
            if self.momentum is not None:
                factor = self.momentum
            elif self.num_batches_tracked is None:
                factor = 1.0
            else:
                factor = self.num_batches_tracked.to(running.dtype).reciprocal()
            running.copy_(torch.where(is_counted, running.lerp(found.to(running.dtype), factor), running))

    def _peers(self) -> Peers | None:
        engine = self._engine
        if engine is None:
            from bagua_core.elastic.step import runtime

            engine = runtime.engine()
        if not engine.in_step or engine.step_failed:
            return None
        communicator = engine.communicator()
        if communicator is None:
            return None
        lane = communicator.lanes.get(Lane.STATISTICS)
        if lane is None:
            raise RuntimeError(
                "a SyncBatchNorm was used in a step, and no wrapped model contains one, so workers have no connections "
                "for its statistics; wrap the model that contains it before the first step"
            )
        return _StepPeers(engine, lane)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Returns `module` with every BatchNorm layer replaced; parameters and buffers are the same objects. A layer
        with several names stays one layer."""
        return cls._converted(module, {})

    @classmethod
    def _converted(cls, module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
        """done: what was converted so far, by the module before."""
        if module in done:
            return done[module]
        done[module] = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            converted = cls(
                module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats
            )
            converted.weight, converted.bias = module.weight, module.bias
            converted.running_mean, converted.running_var = module.running_mean, module.running_var
            converted.num_batches_tracked = module.num_batches_tracked
            converted.training = module.training
            done[module] = converted
            return converted
        for name, child in list(module._modules.items()):  # named_children leaves out a child's second name
            if child is not None:
                setattr(module, name, cls._converted(child, done))
        return module


class Peers(Protocol):
    """The workers whose samples a forward and its backward count. weight: of this worker's samples; 0: they don't."""

    @property
    def weight(self) -> float: ...

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all workers: [workers, *row.shape]."""

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all workers."""


class _StepPeers:
    """The other workers in a step. weight: of this micro-batch; 0 for one that heals."""

    def __init__(self, engine: StepEngine, lane: Communicator) -> None:
        self._engine = engine
        self._lane = lane
        self.weight = engine.micro_batch.weight
        # No vote need come after what a forward exchanges behind the step's reduction: the host waits for it.
        self._needs_wait = engine.is_final

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Returns the rows of all workers, [world_size, *row.shape]; only this worker's if the step fails."""
        rows = row.new_zeros((self._lane.world_size, *row.shape))
        return self._done(lambda: self._lane.allgather(rows, row), rows, row.unsqueeze(0))

    def total(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.clone()
        return self._done(lambda: self._lane.allreduce(whole, ReduceOp.SUM), whole, part)

    def _done(self, start: Callable[[], Pending], result: torch.Tensor, alone: torch.Tensor) -> torch.Tensor:
        if self._engine.step_failed:
            return alone
        try:
            pending = start()
            self._engine.wait(pending if self._needs_wait else Followed(pending))
        except CollectiveFailed as error:
            self._engine.reduction_failed(error)
            return alone
        return result


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        peers: Peers,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        over = [d for d in range(input.dim()) if d != 1]
        count = input.numel() // input.shape[1] if peers.weight else 0
        row = wide.new_zeros(2 * input.shape[1] + 1)
        if count:
            variance, mean = torch.var_mean(wide, over, correction=0)
            row = torch.cat([mean, variance * count, wide.new_full((1,), float(count))])
        mean, squares, counted = _combined(peers.gather(row))
        total = counted
        if not count:  # perhaps no worker has samples here: what comes out is then replaced by zero
            is_empty = total == 0
            mean = torch.where(is_empty, wide.mean(over), mean)
            squares = torch.where(is_empty, torch.ones_like(squares), squares)
            total = torch.where(is_empty, torch.ones_like(total), total)
        variance = squares / total
        inverse = torch.rsqrt(variance + eps)
        shape = [1, -1, *[1] * (input.dim() - 2)]
        normal = (wide - mean.view(shape)) * inverse.view(shape)
        output = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        ctx.save_for_backward(normal, inverse, weight, total)
        ctx.peers, ctx.over, ctx.shape, ctx.has_bias = peers, over, shape, bias is not None
        ctx.mark_non_differentiable(mean, variance, counted)
        return output.to(input.dtype), mean, variance, counted

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (gradient, *_) = gradients
        normal, inverse, weight, total = ctx.saved_tensors
        over, shape, share = ctx.over, ctx.shape, ctx.peers.weight
        wide = gradient.to(normal.dtype)
        of_bias, of_weight = wide.sum(over), (wide * normal).sum(over)
        # Every worker's loss counts by its share of the samples, so its part of the sums does; the reducer multiplies
        # what comes out by the share once more, hence the division.
        sums = ctx.peers.total(torch.stack([of_bias, of_weight]) * share)
        if share:
            mean_gradient, mean_product = sums / (share * total)
            wide = wide - mean_gradient.view(shape) - normal * mean_product.view(shape)
        scale = inverse if weight is None else inverse * weight
        return (
            (wide * scale.view(shape)).to(gradient.dtype),
            None if weight is None else of_weight.to(weight.dtype),
            of_bias.to(gradient.dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


def _combined(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns mean, sum of squared differences from it, and count, of all rows; in rank order, so alike on all workers.

    The count is a tensor without dimensions, as wide as the rows. If it is 0 the others mean nothing.
    """
    features = (rows.shape[1] - 1) // 2
    means, squares, counts = rows[:, :features], rows[:, features : 2 * features], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    spread = (squares + counts * (means - mean) ** 2).sum(0)
    return mean, spread, total
