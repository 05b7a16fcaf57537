"""What a program gives is compared bit by bit, or within rounding but for few elements."""

from __future__ import annotations

import pytest
import torch

from bagua_core.fused_optimizer.agreement import close, same_bits

VALUES = torch.tensor([1.5, -2.0, 0.0, float("nan"), float("inf"), 1e-30])


def test_every_bit_counts_and_nan_is_nan() -> None:
    assert same_bits(VALUES, VALUES.clone())
    for place, other in ((0, 1.5000001), (2, -0.0), (3, 1.0), (4, float("-inf")), (5, float("nan"))):
        got = VALUES.clone()
        got[place] = other
        assert not torch.equal(got.view(torch.int32), VALUES.view(torch.int32))
        assert not same_bits(VALUES, got), other


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(torch.float64, 1e-7, 1e-5), (torch.float32, 1e-4, 1e-2), (torch.bfloat16, 0.05, 0.3)],
)
def test_rounding_is_none_and_few_may_be_far_off(dtype: torch.dtype, near: float, far: float) -> None:
    expected = torch.logspace(-6, 2, 1000, dtype=torch.float64).to(dtype)
    assert close(expected, expected * (1 + near))
    assert not close(expected, expected * (1 + far))
    got = expected.clone()
    got[:40] *= -1
    assert close(expected, got)
    got[:60] = float("nan")
    assert not close(expected, got)
