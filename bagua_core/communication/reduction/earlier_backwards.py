"""Refuses a second backward of a model in a micro-batch that counts what the script has cleared or used up by then.

In a step of several micro-batches the gradients of a backward enter the buckets at its end. What the script does with
.grad before the step's last micro-batch has no effect on them: neither zero_grad() nor an optimizer's step, which waits
for the last micro-batch. Several backwards without either add up as in one process, and stay allowed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_core.communication.reduction.trained_parameters import TrainedParameters, listed
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.errors import UserError
from bagua_core.model.optimizer_steps import OptimizerSteps


class SecondBackwardError(UserError, RuntimeError):
    """A model had another backward in a micro-batch after its gradients were cleared or used."""


class EarlierBackwards:
    """Records the earlier backwards of the micro-batch under way. Records nothing in a step of one micro-batch, where
    .grad is the script's own after each backward."""

    def __init__(self, steps: OptimizerSteps) -> None:
        self._steps = steps
        self._micro_batch: MicroBatch | None = None  # None: it is its whole step
        self._calls_before = 0  # of optimizers in this micro-batch, when its first backward began
        # by parameter with a gradient: the version of the .grad that was left behind; None: that may change by itself
        self._left: dict[torch.nn.Parameter, int | None] = {}
        self.stepped: frozenset[torch.Tensor] = frozenset()
        """Parameters of optimizers that were called since the first backward, while another one runs."""

    @property
    def are_any(self) -> bool:
        return bool(self._left)

    @property
    def are_recorded(self) -> bool:
        return self._micro_batch is not None

    def micro_batch_begins(self, micro_batch: MicroBatch, is_whole_step: bool) -> None:
        """Begins with the first backward of `micro_batch`."""
        self.forget()
        if not is_whole_step:
            self._micro_batch = micro_batch
            self._calls_before = len(self._steps.calls_in(micro_batch))

    def forget(self) -> None:
        self._micro_batch = None
        self._left.clear()
        self.stepped = frozenset()

    def backward_begins(self, names: TrainedParameters) -> None:
        """Checks, before a gradient of another backward is added, that no earlier one was cleared. Parameters whose
        optimizer was called are left to check_unused: the step that waits uses their gradients, so clearing these
        discards nothing. Raises SecondBackwardError."""
        if not self._left:
            return
        calls = self._steps.calls_in(self._micro_batch)[self._calls_before :]
        groups = (group for optimizer in calls for group in optimizer.param_groups)
        self.stepped = frozenset(p for group in groups for p in group["params"])
        cleared = [
            p
            for p, version in self._left.items()
            if p not in self.stepped
            and (p.grad is None or (version is not None and p.grad._version != version))
        ]
        if cleared:
            raise _refusal(cleared, "their gradients were cleared or changed", names)

    def check_unused(self, parameter: torch.nn.Parameter, names: TrainedParameters) -> None:
        """Checks, when `parameter` receives a gradient, that its optimizer was not called since the first backward.
        Raises SecondBackwardError."""
        if parameter in self.stepped:
            raise _refusal([parameter], "optimizer.step() was called", names)

    def backward_ends(self, taken: Iterable[torch.nn.Parameter], changes: bool) -> None:
        """Notes the parameters that received a gradient. changes: .grad may change until the next backward without the
        script. Called only while are_recorded."""
        self.stepped = frozenset()
        self._left.update(dict.fromkeys(taken))
        for p in self._left:
            self._left[p] = None if changes or p.grad is None else p.grad._version


def _refusal(
    parameters: list[torch.nn.Parameter], since: str, names: TrainedParameters
) -> SecondBackwardError:
    return SecondBackwardError(
        f"{listed(names.names_of(parameters)) or 'a model'}: a second backward in one micro-batch, and {since} since "
        "the first one. In a step of several micro-batches (max_local_batch_size) both would count. Call backward() "
        "once, on the sum of the losses; where a loss does not train a model, call its requires_grad_(False) before "
        "the forward; or leave max_local_batch_size out"
    )
