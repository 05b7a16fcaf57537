"""Finds the begin and end of steps in a loop that marks no boundaries, by the forward and the optimizer.

A step begins with the first training forward and ends when every optimizer of the models that took part has stepped,
or, if one never does, at the next training forward after another has. So what follows a loop (evaluation, saving) is
outside steps. A script that marks its steps itself, by ElasticDataLoader or next_step, is left alone from then on.
Knows nothing of membership. Invariant: all workers run the same script, so all take the same turns here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_core.elastic.step.engine import Engine


class LoopSteps:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.marked_by_script = False
        self._announced = False  # next_step was called, and the step has not begun
        self._begun = False  # by a forward that came here
        self._due: set[torch.optim.Optimizer] = set()  # that have not stepped yet in this step
        self._any_stepped = False

    def counts(self, training: bool) -> bool:
        """Tells whether a forward that computes gradients belongs to a step. Evaluation without no_grad does not: it
        may be one rank's alone."""
        return training or self._engine.in_step or self.marked_by_script

    def forward_begins(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Handles the begin of a forward that counts: the first one of a step begins it. optimizers: of the forward's
        model."""
        engine = self._engine
        if self.marked_by_script:
            return
        if engine.in_step and not self._begun:
            self.marked_by_script = True  # by a loader: nothing here has begun this step
            return
        if (engine.in_step and self._any_stepped) or not (engine.in_step or self._announced):
            self._announce()
        self._announced, self._begun = False, True
        self._due.update(optimizers)

    def optimizer_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends the step if `optimizer`, whose step() has returned, was the last one due. It counts whether it acted or
        not."""
        if self.marked_by_script or not (self._begun and self._engine.in_step):
            return
        self._any_stepped = True
        self._due.discard(optimizer)
        if not self._due:
            self._announce()

    def leave_to_script(self) -> None:
        """Stops finding steps, for the script marks them itself: one that it forgets is then an error of its own, not a
        guess here."""
        self.marked_by_script = True

    def next_step(self) -> int:
        """Begins a step that the script marks by itself. See bagua_core.next_step."""
        self.leave_to_script()
        return self._engine.next_step()

    def _announce(self) -> None:
        self._announced, self._begun, self._any_stepped = True, False, False
        self._due.clear()
        # Here a loop draws its next batch, even after a failed step
        self._engine.next_step(resumes_here=False)
