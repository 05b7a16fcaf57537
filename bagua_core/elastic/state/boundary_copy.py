"""Copies of parameters and optimizer state for steps that can fail after they have changed.

Most steps can't: the optimizer steps last, when every reduction of the step is in. Others go on behind a change:
adversarial training, SAM, a collective of the script behind `optimizer.step()`. Such a step needs a copy of what it
changes, which costs a pass over the model and its memory, so the steps that need one are learned. A copy is kept in the
first steps, if it is small or if several models have reductions of their own, and for some steps after each one that
went on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from bagua_core.elastic.state.heal_memory import is_out_of_memory
from bagua_core.model import sharded_tensors
from bagua_core.optimizers.state_copy import OptimizerStateCopy, state_bytes

FIRST_STEPS = 4
LARGEST_FIRST_BYTES = 256 << 20
KEPT_FOR_STEPS = 8
"""Of steps that go on at least this often, every one has a copy."""


class _Copy:
    def __init__(
        self, parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer]
    ) -> None:
        self.values = {id(p): (p, sharded_tensors.copied(p)) for p in parameters}
        self.states = [OptimizerStateCopy(optimizer) for optimizer in optimizers]


class BoundaryCopy:
    """Holds the copy for one worker's step under way, if that step has one."""

    def __init__(self) -> None:
        self.steps_left = 0  # that keep a copy because one went on; travels to workers that join
        self._steps = 0
        self._copy: _Copy | None = None
        self._marked: list[torch.Tensor] = []
        self._marks: list[tuple[int, ...]] = []  # the versions of `_marked` at the first reduction

    @property
    def is_kept(self) -> bool:
        return self._copy is not None

    def step_begins(self) -> None:
        self._steps += 1
        self.steps_left = max(0, self.steps_left - 1)
        self.drop()

    def drop(self) -> None:
        self._copy, self._marked, self._marks = None, [], []

    def reduced(
        self,
        parameters: list[torch.Tensor],
        optimizers: list[torch.optim.Optimizer],
        has_several_models: bool = False,
    ) -> None:
        """Records that the first reduction of the step is in, and takes a copy if the step is likely to go on.

        Nothing was changed yet but what a snapshot has. has_several_models: this is the reduction of one of several, so
        the step is likely to go on.
        """
        self._marked, self._marks = parameters, sharded_tensors.versions(parameters)
        is_first = self._steps <= FIRST_STEPS and (
            has_several_models or _size_bytes(parameters, optimizers) <= LARGEST_FIRST_BYTES
        )
        if not (self.steps_left or is_first):
            return
        try:
            with torch.no_grad():
                self._copy = _Copy(parameters, optimizers)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._copy = None  # optimizer steps are then final one by one

    def goes_on(self) -> None:
        """Records that a collective of the step follows a change of parameters or of the optimizers' state."""
        self.steps_left = KEPT_FOR_STEPS + 1

    def is_moved(self) -> bool:
        """Tells whether parameters have changed since the step's first reduction."""
        return sharded_tensors.versions(self._marked) != self._marks

    def saved(self) -> Mapping[int, torch.Tensor]:
        """Returns the copied values of the parameters, by the parameters' ids: local tensors."""
        return {} if self._copy is None else {key: value for key, (_, value) in self._copy.values.items()}

    def put_back(self) -> bool:
        """Writes the copy back, which uses it up. Returns whether there was a copy."""
        kept = self._copy
        self.drop()
        if kept is None:
            return False
        for parameter, value in kept.values.values():
            sharded_tensors.local(parameter).data.copy_(value)
        for state in kept.states:
            state.put_back()
        return True


def _size_bytes(parameters: list[torch.Tensor], optimizers: list[torch.optim.Optimizer]) -> int:
    return sum(map(sharded_tensors.local_bytes, parameters)) + sum(map(state_bytes, optimizers))
