"""On a GPU as on the CPU: the same bits on blocks, and within rounding compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.fused_optimizer.test_compiled_step import close
from tests.core.fused_optimizer.test_every_torch_optimizer import ELEMENTWISE
from tests.core.fused_optimizer.twins import Twins, shapes_net

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.mark.parametrize("kind", ELEMENTWISE)
@pytest.mark.parametrize("stay", [True, False], ids=["gradients stay", "gradients are new"])
def test_the_same_bits(kind: type[Any], stay: bool) -> None:
    twins = Twins(kind, shapes_net, device=DEVICE)
    twins.train(6, set_to_none=not stay)
    twins.check()
    assert all(block.whole.device.type == DEVICE for block in twins.blocks)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Rprop])
def test_compiled(kind: type[Any]) -> None:
    twins = Twins(lambda params: kind(params, lr=1e-4), shapes_net, device=DEVICE, compile=True)
    twins.train(6)
    twins.check(close)
    assert twins.step.compiled.compilations >= 1


def test_a_scaler_that_skips_steps() -> None:
    """An overflow found on the device: neither of both steps."""
    twins = Twins(torch.optim.AdamW, shapes_net, device=DEVICE)
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=2.0**10) for _ in range(2)]
    for step in range(5):
        for (model, optimizer), scaler in zip(twins.pairs(), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 6, device=DEVICE)).square().mean()).backward()
            if step == 2:
                next(model.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
        twins.check()
    assert {scaler.get_scale() for scaler in scalers} == {2.0**9}
