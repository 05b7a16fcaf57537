"""QAdamOptimizer follows its formula exactly, in the warm-up and after it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from bagua_core.algorithms import QAdamOptimizer
from tests.core.defaults import default_dtype

WARMUP, STEPS = 4, 9
GRADIENTS = torch.randn(STEPS, 2, 7, generator=torch.Generator().manual_seed(3))
BEGIN = torch.randn(2, 7, generator=torch.Generator().manual_seed(4))


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(row.clone()) for row in BEGIN]


def run(optimizer: torch.optim.Optimizer, held: Sequence[nn.Parameter], steps: range) -> None:
    for step in steps:
        for place, parameter in enumerate(held):
            parameter.grad = GRADIENTS[step, place].clone()
        optimizer.step()


def by_hand(
    place: int, betas: tuple[float, float], weight_decay: float, lr: float = 0.01, eps: float = 1e-8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(parameter, first moment, second moment) after all steps, in float64."""
    x, m, v = BEGIN[place].double(), torch.zeros(7).double(), torch.zeros(7).double()
    for step in range(1, STEPS + 1):
        gradient = GRADIENTS[step - 1, place].double() + weight_decay * x
        m = betas[0] * m + (1 - betas[0]) * gradient
        if step <= WARMUP:
            v = betas[1] * v + (1 - betas[1]) * gradient**2
        scale = (v / (1 - betas[1] ** min(step, WARMUP))).sqrt() + eps
        x = x - lr / (1 - betas[0] ** step) * m / scale
    return x, m, v


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_the_warm_up_is_adam(weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = QAdamOptimizer(ours, lr=0.01, warmup_steps=STEPS, weight_decay=weight_decay)
    run(optimizer, ours, range(STEPS))
    run(torch.optim.Adam(theirs, lr=0.01, weight_decay=weight_decay), theirs, range(STEPS))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def long_warm_up(optimizer: QAdamOptimizer, ours: nn.Parameter, theirs: nn.Parameter, steps: range) -> None:
    """Steps of the optimizer and of torch's Adam, in which the moments and their corrections change all the time."""
    adam = torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.9999))
    for step in range(steps.stop):
        theirs.grad = GRADIENTS[step % STEPS, 0] * (1 + step / 100)
        adam.step()
        if step in steps:
            ours.grad = theirs.grad.clone()
            optimizer.step()
    assert int(optimizer.state[ours]["step"]) == steps.stop
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_steps_are_counted_beyond_what_the_default_dtype_holds() -> None:
    (ours, _), (theirs, _) = parameters(), parameters()
    with default_dtype(torch.bfloat16):  # in which 256 + 1 is 256
        optimizer = QAdamOptimizer([ours], lr=0.01, warmup_steps=1000, betas=(0.9, 0.9999))
        long_warm_up(optimizer, ours, theirs, range(300))


@pytest.mark.parametrize("how", ["load_state_dict", "pickle"])
def test_a_count_of_low_precision_is_widened(how: str) -> None:
    (ours, _), (theirs, _) = parameters(), parameters()
    optimizer = QAdamOptimizer([ours], lr=0.01, warmup_steps=1000, betas=(0.9, 0.9999))
    long_warm_up(optimizer, ours, nn.Parameter(theirs.detach().clone()), range(250))
    optimizer.state[ours]["step"] = optimizer.state[ours]["step"].bfloat16()
    if how == "pickle":
        optimizer = copy.deepcopy(optimizer)
        ours = optimizer.param_groups[0]["params"][0]
    else:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    long_warm_up(optimizer, ours, theirs, range(250, 300))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_after_it_the_second_moment_rests_and_all_else_goes_on(weight_decay: float) -> None:
    held = parameters()
    optimizer = QAdamOptimizer(held, lr=0.01, warmup_steps=WARMUP, weight_decay=weight_decay)
    run(optimizer, held, range(STEPS))
    for place, parameter in enumerate(held):
        x, m, v = by_hand(place, (0.9, 0.999), weight_decay)
        state = optimizer.state[parameter]
        torch.testing.assert_close(parameter.double(), x, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-9)
        assert int(state["step"]) == STEPS


def test_the_gradient_of_the_warm_ups_last_step_counts() -> None:
    held = parameters()
    optimizer = QAdamOptimizer(held, lr=0.01, warmup_steps=WARMUP)
    run(optimizer, held, range(WARMUP - 1))
    before = copy.deepcopy(optimizer.state_dict())["state"]
    run(optimizer, held, range(WARMUP - 1, WARMUP))
    for place in range(2):
        last, state = GRADIENTS[WARMUP - 1, place], optimizer.state_dict()["state"][place]
        torch.testing.assert_close(state["exp_avg"], 0.9 * before[place]["exp_avg"] + 0.1 * last)
        torch.testing.assert_close(state["exp_avg_sq"], 0.999 * before[place]["exp_avg_sq"] + 0.001 * last**2)


def test_weight_decay_does_not_stop_with_the_warm_up() -> None:
    held = parameters()
    optimizer = QAdamOptimizer(held, lr=0.01, warmup_steps=WARMUP, weight_decay=0.5)
    run(optimizer, held, range(WARMUP))
    before = [p.detach().clone() for p in held]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in held]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, was, m in zip(held, before, moments, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], 0.9 * m + 0.1 * 0.5 * was)


def test_the_bias_correction_of_what_rests_rests_too() -> None:
    """A gradient that never changes moves a parameter by the learning rate in every step, the thousandth too."""
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = QAdamOptimizer([parameter], lr=0.01, warmup_steps=WARMUP)
    for step in range(1, 200):
        parameter.grad = torch.tensor([0.5, -2.0, 1e-3])
        optimizer.step()
        expected = torch.tensor([-1.0, 1.0, -1.0]) * 0.01 * step
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-4, atol=1e-6)


def test_each_groups_own_betas_count() -> None:
    first, second = parameters()
    options: list[dict[str, Any]] = [
        {"params": [first], "betas": (0.5, 0.9)},
        {"params": [second], "betas": (0.8, 0.99), "weight_decay": 0.2, "lr": 0.02},
    ]
    optimizer = QAdamOptimizer(options, lr=0.01, warmup_steps=WARMUP)
    run(optimizer, [first, second], range(STEPS))
    torch.testing.assert_close(first.double(), by_hand(0, (0.5, 0.9), 0.0)[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        second.double(), by_hand(1, (0.8, 0.99), 0.2, lr=0.02)[0], rtol=1e-5, atol=1e-6
    )


def test_a_state_that_travelled_goes_on_alike() -> None:
    held, other = parameters(), parameters()
    optimizer = QAdamOptimizer(held, lr=0.01, warmup_steps=WARMUP, weight_decay=0.1)
    run(optimizer, held, range(WARMUP + 1))
    taking = QAdamOptimizer(other, lr=0.5, warmup_steps=77)
    taking.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        for a, b in zip(other, held, strict=True):
            a.copy_(b)
    assert taking.is_warm(other)
    run(optimizer, held, range(WARMUP + 1, STEPS))
    run(taking, other, range(WARMUP + 1, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(held, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_however_tensors_lie_in_memory(dtype: torch.dtype) -> None:
    """Channels last, with gaps, and a state that lies otherwise than its parameter."""
    begin = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(5)).to(dtype)
    last = nn.Parameter(begin.clone().contiguous(memory_format=torch.channels_last))
    spread = nn.Parameter(torch.zeros(2, 3, 4, 10, dtype=dtype)[..., ::2])
    with torch.no_grad():
        spread.copy_(begin)
    plain, moved = nn.Parameter(begin.clone()), nn.Parameter(last.detach().clone())
    held = [plain, last, spread, moved]
    optimizers = [QAdamOptimizer([p], lr=0.01, warmup_steps=2, weight_decay=0.1) for p in held]
    for step in range(5):
        gradient = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        for optimizer, parameter in zip(optimizers, held, strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        if step == 2:
            optimizers[3].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            assert optimizers[3].state[moved]["exp_avg"].is_contiguous() and not moved.is_contiguous()
        for parameter in held[1:]:
            assert torch.equal(parameter, plain), f"step {step}"


def test_a_step_is_seen_by_autograd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = QAdamOptimizer([parameter], warmup_steps=1)
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
    loss = (parameter**2).sum()
    parameter.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_whether_the_warm_up_is_over() -> None:
    first, second = parameters()
    optimizer = QAdamOptimizer([first, second], warmup_steps=2)
    assert not optimizer.is_warm([first, second])
    for _ in range(3):
        assert not optimizer.is_warm([first])
        first.grad = torch.ones(7)
        optimizer.step()
    assert optimizer.is_warm([first]) and not optimizer.is_warm([second])
    assert optimizer.is_warm([first, second]), "one that was never used does not hold the others back"
    second.grad = torch.ones(7)
    optimizer.step()
    assert optimizer.is_warm([first, second]), "nor does one that is in its own warm-up"
    assert optimizer.late_count(second) == second.numel() and optimizer.late_elements(second).all()


def test_a_closure_is_called() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = QAdamOptimizer([parameter])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    assert parameter[0] < 1.0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0; it must be 0 or more"),
        ({"warmup_steps": 0}, "warmup_steps=0; it must be 1 or more"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\]=1.0"),
        ({"betas": (0.9, math.inf)}, r"betas\[1\]=inf"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        QAdamOptimizer(parameters(), **arguments)
    with pytest.raises(ValueError, match=text):
        QAdamOptimizer([{"params": parameters(), **arguments}])


def test_complex_and_sparse_are_refused() -> None:
    with pytest.raises(ValueError, match="complex64"):
        QAdamOptimizer([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2).to_sparse()
    with pytest.raises(ValueError, match="dense gradients only"):
        QAdamOptimizer([parameter]).step()
