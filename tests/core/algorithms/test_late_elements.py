"""Elements that had too few gradients in the warm-up: plain Adam until they have had enough, then frozen too."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from bagua_core.algorithms import QAdamOptimizer, late_elements
from bagua_core.algorithms.late_elements import SEGMENT, WHOLE, sum_where_touched
from bagua_core.algorithms.qadam_optimizer import FREEZE_EVERY, LEAST_GRADIENTS
from bagua_core.communication.communicator import Communicator
from tests.core.communication.worlds import in_process_world, run_ranks

ROWS, WIDTH, WARMUP, STEPS = 6, 5, 40, 60
LATE_ROWS = slice(3, 6)  # the first of them has a few gradients in the warm-up
BETAS = (0.8, 0.95)


def gradient(step: int) -> torch.Tensor:
    """Rows 0 to 2 in each step, row 3 in every tenth, row 4 in one of the warm-up, row 5 after it alone."""
    found = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    if step % 10:
        found[3] = 0
    if step < WARMUP and step != 7:
        found[4] = 0
    if step < WARMUP + 5:
        found[5] = 0
    return found


def table(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99)).to(dtype))


def ours(parameter: nn.Parameter, weight_decay: float = 0.0) -> QAdamOptimizer:
    return QAdamOptimizer(
        [parameter], lr=0.01, warmup_steps=WARMUP, betas=BETAS, eps=1e-6, weight_decay=weight_decay
    )


def run(
    parameter: nn.Parameter, optimizer: torch.optim.Optimizer, begin: int = 0, end: int = STEPS
) -> torch.Tensor:
    for step in range(begin, end):
        parameter.grad = gradient(step).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_late_rows_move_as_under_adam_and_the_others_are_frozen(weight_decay: float) -> None:
    mine, theirs = table(), table()
    optimizer = ours(mine, weight_decay)
    adam = torch.optim.Adam([theirs], lr=0.01, betas=BETAS, eps=1e-6, weight_decay=weight_decay)
    found, expected = run(mine, optimizer), run(theirs, adam)
    torch.testing.assert_close(found[LATE_ROWS], expected[LATE_ROWS], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[:3], expected[:3], rtol=1e-3), "the other rows are not frozen"
    assert bool((found[5] != table()[5]).all()), "a row that wakes up late does not move"
    late = optimizer.late_elements(mine)
    assert late is not None and late[LATE_ROWS].all() and not late[:3].any()
    assert optimizer.late_count(mine) == int(late.sum()) == 3 * WIDTH


def test_a_row_that_has_had_enough_gradients_is_frozen_with_the_scale_it_has_then() -> None:
    parameter = table()
    optimizer = ours(parameter)
    state = optimizer.state
    run(parameter, optimizer, end=WARMUP + 1)
    assert optimizer.late_count(parameter) == 3 * WIDTH
    step = WARMUP + 1
    while optimizer.late_elements(parameter)[5].any():  # type: ignore[index]
        assert step < WARMUP + LEAST_GRADIENTS + 2 * FREEZE_EVERY, "it stays late"
        before = state[parameter]["exp_avg_sq"][5].clone()
        run(parameter, optimizer, step, step + 1)
        step += 1
    assert step - WARMUP >= LEAST_GRADIENTS + 5
    step -= 1  # the last one only froze it
    # Adam's second moment and bias correction in that step, in double precision
    second = torch.zeros(WIDTH, dtype=torch.float64)
    for past in range(step):
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient(past)[5].double() ** 2
    corrected = state[parameter]["exp_avg_sq"][5].double() / (1 - BETAS[1] ** WARMUP)
    torch.testing.assert_close(corrected, second / (1 - BETAS[1] ** step), rtol=1e-5, atol=1e-9)
    kept = state[parameter]["exp_avg_sq"][5].clone()
    assert not torch.equal(before, kept)
    run(parameter, optimizer, step + 1, step + 1 + FREEZE_EVERY)
    assert torch.equal(state[parameter]["exp_avg_sq"][5], kept)


def test_nothing_late_costs_no_memory() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = QAdamOptimizer([parameter], warmup_steps=3)
    for _ in range(4):
        parameter.grad = torch.ones(4)
        optimizer.step()
    assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq", "late"}
    assert optimizer.late_elements(parameter) is None and optimizer.late_count(parameter) == 0


def test_a_parameter_that_was_never_stepped_is_late() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = QAdamOptimizer([parameter])
    late = optimizer.late_elements(parameter)
    assert late is not None and late.all() and optimizer.late_count(parameter) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("at", [WARMUP - 3, WARMUP, WARMUP + 1, WARMUP + 9, WARMUP + FREEZE_EVERY])
def test_a_state_with_late_elements_travels(dtype: torch.dtype, at: int) -> None:
    parameter, taking = table(dtype), table(dtype)
    optimizer, other = ours(parameter), QAdamOptimizer([taking])
    run(parameter, optimizer, end=at)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert other.loads == 1
    with torch.no_grad():
        taking.copy_(parameter)
    for name, value in optimizer.state[parameter].items():
        if isinstance(value, torch.Tensor):
            assert other.state[taking][name].dtype == value.dtype, name
    assert torch.equal(run(taking, other, at), run(parameter, optimizer, at))


def test_a_count_of_a_state_that_was_set_back_is_not_used() -> None:
    parameter, twin = table(), table()
    optimizer, other = ours(parameter), ours(twin)
    run(parameter, optimizer, end=WARMUP - 1)
    earlier = copy.deepcopy(optimizer.state_dict())
    values = parameter.detach().clone()
    run(parameter, optimizer, WARMUP - 1, WARMUP)
    optimizer.load_state_dict(earlier)
    parameter.data.copy_(values)
    run(parameter, optimizer, WARMUP - 1)
    assert torch.equal(parameter, run(twin, other))
    copied = copy.deepcopy(optimizer)
    assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    copied.step()


def test_a_state_of_adam_is_taken_over() -> None:
    parameter = table()
    adam = torch.optim.Adam([parameter], lr=0.01, betas=BETAS)
    run(parameter, adam, end=WARMUP + 2)
    optimizer = ours(parameter)
    given = copy.deepcopy(adam.state_dict())
    given["param_groups"][0] |= {"warmup_steps": WARMUP}
    optimizer.load_state_dict(given)
    late = optimizer.late_elements(parameter)
    assert late is not None and late[5].all() and not late[:5].any()
    run(parameter, optimizer, WARMUP + 2, WARMUP + 10)
    assert parameter.isfinite().all()


def test_a_second_moment_that_vanished_in_its_dtype_is_not_frozen() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = QAdamOptimizer([parameter], warmup_steps=2)
    for _ in range(3):
        parameter.grad = torch.tensor([1.0, 1e-30])
        optimizer.step()
    assert optimizer.late_elements(parameter).tolist() == [False, True]  # type: ignore[union-attr]


def drained(communicator: Communicator) -> Callable[[torch.Tensor], torch.Tensor]:
    def act(values: torch.Tensor) -> torch.Tensor:
        job = sum_where_touched(communicator, values)
        while True:
            try:
                next(job).wait()
            except StopIteration as ended:
                found: torch.Tensor = ended.value
                return found

    return act


@pytest.mark.parametrize("count", [1, SEGMENT, 3 * SEGMENT + 5])
def test_sums_are_exact_and_only_what_some_rank_touched_travels(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_elements, "WHOLE", 0)
    touched = 1 if count <= SEGMENT else 2
    assert sizes_of_messages(count) == [-(-count // SEGMENT), touched * SEGMENT * 4]


def test_a_few_values_travel_whole_in_one_message() -> None:
    assert sizes_of_messages(WHOLE) == [WHOLE * 4]
    assert len(sizes_of_messages(WHOLE + 1)) == 2


def sizes_of_messages(count: int) -> list[int]:
    """Of rank 0, in bytes. Checks the sums."""
    world = in_process_world(3)
    sizes: list[int] = []
    original = world[0].allreduce
    world[0].allreduce = lambda t, *more: (sizes.append(t.nbytes), original(t, *more))[1]  # type: ignore[method-assign]
    values = torch.zeros(3, count)
    values[1, 0], values[2, 0], values[2, -1] = 1.0, 2.0, math.inf
    got = run_ranks(world, lambda c: drained(c)(values[c.global_rank].clone()))
    for found in got:
        assert torch.equal(found, values.sum(0))
    return sizes


def test_nothing_touched_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_elements, "WHOLE", 0)
    world = in_process_world(2)
    got = run_ranks(world, lambda c: drained(c)(torch.zeros(100)))
    assert all(torch.equal(found, torch.zeros(100)) for found in got)
