"""Can what a program gives stand for what the step gives? Told by both on the same random elements."""

from __future__ import annotations

import torch
from torch import Tensor

# Of what the step gives. Where a rounding decides (by a sign, or where two numbers all but cancel out) elements may be
# anything, and such are few.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1}
_MOST_FAR = 0.05  # share of elements


def same_bits(expected: Tensor, got: Tensor) -> bool:
    """fp32. NaN is NaN."""
    bits = [
        t.detach().nan_to_num(0.0, float("inf"), float("-inf")).view(torch.int32) for t in (expected, got)
    ]
    return torch.equal(expected.isnan(), got.isnan()) and torch.equal(*bits)


def close(expected: Tensor, got: Tensor) -> bool:
    """Within rounding, but for few. Where a precision has so small a range that most random elements leave it (fp16),
    nothing can be said against it."""
    rounding = _ROUNDING.get(expected.dtype)
    if rounding is None:
        return True
    near = torch.isclose(got.detach(), expected.detach(), rtol=rounding, atol=0.0, equal_nan=True)
    return float((~near).float().mean()) <= _MOST_FAR
