"""What a recording becomes as a program of the CPU's library: which registers, what is left out, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bagua_core.fused_optimizer.lowering import Lowered, lower
from bagua_core.fused_optimizer.recording import NotRecordable, Recorder, Recording

Operations = Callable[[Tensor, Tensor, Tensor], Any]
P, G, M = range(3)  # the memories: parameter, gradient, state


def recorded(operations: Operations) -> Recording:
    """operations: on a parameter, its gradient and its state; a tensor that they return is its new state."""
    tensors = {"parameter": torch.ones(5), "gradient": torch.ones(5), ("state", "m"): torch.ones(5)}
    recorder = Recorder()
    recording = recorder.follow(tensors)
    with recorder:
        state = operations(*tensors.values())
    if isinstance(state, Tensor) and state is not tensors["parameter"]:
        recording.results["m"] = recorder.value_of(recording, state)
    return recording


def lowered(operations: Operations, **variants: str) -> Lowered:
    return lower(recorded(operations), variants)


def names(program: Lowered) -> list[str]:
    return [step.operation for step in program.steps]


def test_in_place_on_memory_and_temporaries_that_are_used_again() -> None:
    def operations(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.mul_(0.9).add_(g)
        first = m + 1.0  # done with after the next line
        p.sub_(first)
        second = g * g
        p.add_(second, alpha=2.0)

    program = lowered(operations)
    assert [(s.operation, s.to, s.x, s.y) for s in program.steps] == [
        ("multiply_number", M, M, 0),
        ("add", M, M, G),
        ("add_number", 3, M, 0),
        ("subtract", P, P, 3),
        ("multiply", 3, G, G),
        ("add_scaled", P, P, 3),
    ]
    assert (program.memories, program.temporaries, program.results) == (3, 1, ())
    assert program.written == {P, M}


def test_a_new_state_takes_the_place_of_the_old_one_where_that_is_done_with() -> None:
    def done_with(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
        new = m * 0.9 + g
        p.sub_(new)
        return new

    def used_again(p: Tensor, g: Tensor, m: Tensor) -> Tensor:
        new = m * 0.9
        p.sub_(new).sub_(m)
        return new

    program = lowered(done_with)
    assert program.results == (M,) and program.memories == 3 and program.written == {P, M}
    program = lowered(used_again)
    assert program.results == (3,) and program.memories == 4 and program.written == {P, 3}


def test_what_nobody_needs_is_left_out() -> None:
    def operations(p: Tensor, g: Tensor, m: Tensor) -> None:
        zeros = torch.zeros_like(p)  # as `state.get("m", torch.zeros_like(p))` makes them in each step
        zeros.add_(1.0)
        p.sub_(g).sub_(m)

    assert names(lowered(operations)) == ["subtract", "subtract"]


@pytest.mark.parametrize("by_index", [True, False])
def test_numbers_come_before_constants_of_the_program(by_index: bool) -> None:
    def operations(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.mul_(0.5).addcmul_(g, m)
        mask = g.gt(3.0)
        if by_index:
            p[mask] = 7.0
        else:
            p.masked_fill_(mask, 7.0)

    recording = recorded(operations)
    program = lower(recording, {})
    assert names(program) == ["multiply_number", "add_product", "above", "replace_where"]
    numbers = [*recording.numbers, *(s.item() for s in recording.shared), *program.constants]
    assert [numbers[step.number] for step in program.steps] == [0.5, 1.0, 3.0, 7.0]


def test_variants_of_this_machine_take_the_place_of_operations() -> None:
    program = lowered(
        lambda p, g, m: p.addcmul_(g, m).sqrt_(), add_product="add_product_fused", sqrt="given_sqrt"
    )
    assert names(program) == ["add_product_fused", "given_sqrt"]


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        (lambda p, g, m: p.sub_(g), "passes over memory once as it is"),
        (lambda p, g, m: p.sub_(g.exp()), "the library has no exp"),
        (lambda p, g, m: p.sub_(torch.lerp(g, m, m)), "is no number"),
        (lambda p, g, m: p.sub_(g.gt(0) * g), "another sort"),
        (
            lambda p, g, m: p.sub_(torch.div(g, m, rounding_mode="floor")),
            "arguments that the library's operation lacks",
        ),
        (lambda p, g, m: p.sub_(1.0 - g), "the library has no rsub"),
    ],
)
def test_what_the_library_cannot_do_is_refused_with_the_reason(operations: Operations, words: str) -> None:
    with pytest.raises(NotRecordable, match=words):
        lowered(operations)
