"""Runs optimizers that call their closure several times in a step, such as LBFGS: alike on all ranks, whole or undone.

Such an optimizer decides by the loss where to go and whether to call again, so it sees the job's loss and not this
rank's. Each call is a reduction that may fail when parameters have moved already. The step is then abandoned, and
parameters and the optimizer's state become what they were before it. So it goes with those that call their closure
once, but after they have moved parameters, such as SAM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagua_core.communication.communicator import CollectiveFailed
from bagua_core.communication.step_interface import MicroBatch, StepEngine
from bagua_core.errors import BaguaError, UserError
from bagua_core.model.sharded_tensors import version
from bagua_core.optimizers.state_copy import OptimizerStateCopy


class RepeatedClosureError(UserError, RuntimeError):
    """Raised if an optimizer calls its closure several times in a step in which this cannot be right."""


class StepAbandoned(BaguaError):
    """Raised if a later call of the closure failed. It never leaves the gate."""


class RepeatedClosure:
    """The closure that step() gets in place of the script's. loss: the job's, of the newest call.

    before: the optimizer's parameters as they are now. refusal: why the optimizer must not call the closure again
    (given False), or after it has moved parameters (given True); None if it may.
    """

    def __init__(
        self,
        closure: Callable[[], Any],
        before: Before,
        engine: StepEngine,
        refusal: Callable[[bool], str | None],
    ) -> None:
        self._closure = closure
        self._before = before
        self._engine = engine
        self._refusal = refusal
        self._is_called = False
        self._holds_first = False
        self.loss: Any = None

    def called_already(self, loss: Any) -> None:
        """Takes the job's `loss` of the step's first call, which is done. It counts unless parameters move before
        it."""
        self.loss, self._holds_first = loss, True

    def __call__(self) -> Any:
        """Calls the closure and returns the job's loss. Raises StepAbandoned, RepeatedClosureError."""
        is_first, self._is_called = not self._is_called, True
        moved = is_first and self._before.is_moved
        if is_first and self._holds_first and not moved:
            return self.loss
        why_not = self._refusal(moved) if moved or not is_first else None
        if why_not is not None:
            raise RepeatedClosureError(why_not)
        self.loss = self._closure()
        if not self._engine.step_failed:
            self.loss = job_loss(self.loss, self._engine)
        if self._engine.step_failed:
            raise StepAbandoned
        return self.loss


def check_has_job_loss(optimizer: torch.optim.Optimizer, micro_batch: MicroBatch) -> None:
    """Refuses a step in which the workers of a replica have samples of their own: job_loss would lack the samples of
    all other shards. Raises RepeatedClosureError."""
    if (micro_batch.part, micro_batch.own) != (1.0, 1.0):
        raise RepeatedClosureError(
            f"{type(optimizer).__name__} may call its closure several times and decides by the mean loss, which is "
            "formed among the workers with one shard, but each worker of a replica has its own samples; use an "
            "optimizer that calls its closure once"
        )


def job_loss(loss: Any, engine: StepEngine) -> Any:
    """Returns the mean of all ranks' losses, weighted as their gradients are, in the type of `loss`.

    The reduction is part of the step: if it fails the step does, and `loss` comes back. A `loss` that is no number
    comes back too. So does the loss of a local step of a round.
    """
    if engine.round_steps is not None:
        return loss  # workers take different numbers of local steps, so others may never come to a reduction
    communicator = engine.communicator()
    is_number = isinstance(loss, (int, float)) or (isinstance(loss, torch.Tensor) and loss.numel() == 1)
    if communicator is None or not is_number:
        return loss
    weight = engine.micro_batch.weight
    own = float(loss.detach() if isinstance(loss, torch.Tensor) else loss)
    # replaced, not multiplied: the loss of a rank without a share may be NaN
    total = torch.tensor([weight * own if weight else 0.0], dtype=torch.float64, device="cpu")
    try:
        engine.wait(communicator.allreduce(total))
    except CollectiveFailed as error:
        engine.reduction_failed(error)
        return loss
    mean = total.item()
    return torch.full_like(loss, mean) if isinstance(loss, torch.Tensor) else mean


class Before:
    """A copy of an optimizer's parameters and state as they are now."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._versions = [version(p) for p in parameters]
        self._state = OptimizerStateCopy(optimizer)

    @property
    def is_moved(self) -> bool:
        """Whether parameters have changed since the copy was made."""
        return any(version(p) != v for (p, _), v in zip(self._parameters, self._versions, strict=True))

    def put_back(self) -> None:
        with torch.no_grad():
            for parameter, saved in self._parameters:
                parameter.copy_(saved)
        self._state.put_back()
