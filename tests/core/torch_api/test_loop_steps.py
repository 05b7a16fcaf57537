"""The begin and end of steps in a loop that marks none."""

from __future__ import annotations

import torch
from torch import nn

from bagua_core.torch_api.loop_steps import LoopSteps


class Engine:
    def __init__(self) -> None:
        self.in_step = False
        self.announced = 0
        self._is_announced = False

    def next_step(self, resumes_here: bool = True) -> int:
        self.in_step = False
        self.announced += 1
        self._is_announced = True
        return self.announced

    def begins(self) -> None:
        """A model's forward has reached the core."""
        if self._is_announced:
            self._is_announced, self.in_step = False, True


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


class Loop:
    def __init__(self) -> None:
        self.engine = Engine()
        self.steps = LoopSteps(self.engine)

    def forward(self, *optimizers: torch.optim.Optimizer) -> None:
        self.steps.forward_begins(optimizers)
        self.engine.begins()


def test_a_step_is_from_forward_to_optimizer() -> None:
    loop, one = Loop(), optimizer()
    for n in range(3):
        loop.forward(one)
        assert loop.engine.in_step and loop.engine.announced == n + 1
        loop.steps.optimizer_stepped(one)
        assert not loop.engine.in_step, "what follows the loop is outside steps"
        assert loop.engine.announced == n + 2


def test_several_forwards_belong_to_one_step() -> None:
    loop, one = Loop(), optimizer()
    for _ in range(3):
        loop.forward(one)
    assert loop.engine.announced == 1
    loop.steps.optimizer_stepped(one)
    assert loop.engine.announced == 2


def test_a_step_waits_for_all_optimizers_of_the_models_that_took_part() -> None:
    loop, one, other = Loop(), optimizer(), optimizer()
    loop.forward(one, other)
    loop.steps.optimizer_stepped(one)
    assert loop.engine.in_step
    loop.steps.optimizer_stepped(other)
    assert not loop.engine.in_step and loop.engine.announced == 2


def test_an_optimizer_that_is_left_out_does_not_keep_a_step_open() -> None:
    """Adversarial training: the critic's model takes part in the generator's step, its optimizer does not."""
    loop, generator, critic = Loop(), optimizer(), optimizer()
    for n in range(1, 4):
        loop.forward(critic)
        loop.steps.optimizer_stepped(critic)
        loop.forward(generator)
        loop.forward(critic)
        loop.steps.optimizer_stepped(generator)
        assert loop.engine.in_step and loop.engine.announced == 2 * n
    loop.forward(critic)
    assert loop.engine.announced == 7


def test_an_optimizer_that_did_not_step_at_all_continues_the_step() -> None:
    """As a gradient scaler does when it finds infinities."""
    loop, one = Loop(), optimizer()
    loop.forward(one)
    loop.forward(one)
    assert loop.engine.announced == 1


def test_steps_of_optimizers_outside_steps_do_not_count() -> None:
    loop, one = Loop(), optimizer()
    loop.steps.optimizer_stepped(one)
    assert loop.engine.announced == 0


def test_a_script_that_marks_its_steps_is_left_alone() -> None:
    loop, one = Loop(), optimizer()
    assert loop.steps.next_step() == 1
    loop.forward(one)
    loop.steps.optimizer_stepped(one)
    loop.forward(one)
    assert loop.engine.announced == 1


def test_a_step_that_a_loader_began_is_left_alone() -> None:
    loop, one = Loop(), optimizer()
    loop.engine.in_step = True
    loop.forward(one)
    loop.steps.optimizer_stepped(one)
    assert loop.engine.announced == 0 and loop.steps.marked_by_script


def test_evaluation_counts_only_in_a_step_or_where_the_script_marks_them() -> None:
    loop = Loop()
    assert loop.steps.counts(training=True)
    assert not loop.steps.counts(training=False)
    loop.engine.in_step = True
    assert loop.steps.counts(training=False)
    loop.engine.in_step = False
    loop.steps.next_step()
    assert loop.steps.counts(training=False)
