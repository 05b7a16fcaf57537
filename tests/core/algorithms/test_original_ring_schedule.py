"""The low-precision ring against the original's: when it exchanges, and what comes out, over several intervals.

The reference follows the published schedule in plain torch, without anything of this runtime: L, R and W begin as the
model that all ranks share; after the optimizer's step of steps 0, interval, 2 * interval, ... each rank sends C = Q(t).
"""

from __future__ import annotations

import pytest
import torch

from bagua_core.algorithms import LowPrecisionDecentralized
from tests.core.algorithms.weight_workers import Replica, Shares, train_all, workers

STEPS = 9
TOLERANCE = 1e-6
ROUNDED_OTHERWISE = 2  # of 53 weights: a t between two of the 255 levels may fall to either


def quantized(t: torch.Tensor) -> torch.Tensor:
    """MinMaxUInt8 there and back."""
    scale = 255.0 / (t.max() - t.min() + 1e-7)
    upper = torch.round(t.max() * scale)
    lower = upper - 255.0
    levels = torch.minimum(torch.round(t * scale), upper) - lower
    return (levels.clamp(0, 255) + lower) / scale


def reference(size: int, interval: int) -> list[list[torch.Tensor]]:
    """The weights that each rank's forwards see."""
    replicas = [Replica(rank) for rank in range(size)]
    public = [replica.weights() for replica in replicas]
    seen: list[list[torch.Tensor]] = [[] for _ in replicas]
    for step in range(STEPS):
        for replica, weights in zip(replicas, seen, strict=True):
            weights.append(replica.weights())
            replica.learn(step, Shares.even(size))
            replica.step()
        if step % interval:
            continue
        told = []
        for rank, replica in enumerate(replicas):
            left, right = public[rank - 1], public[(rank + 1) % size]
            told.append(quantized(replica.weights() + left / 3 + right / 3 - 5 * public[rank] / 3))
        public = [own + c for own, c in zip(public, told, strict=True)]
        for replica, own in zip(replicas, public, strict=True):
            replica.set_weights(own)
    return seen


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [2, 3])
def test_it_exchanges_when_the_original_did(size: int, interval: int) -> None:
    members = workers(size, LowPrecisionDecentralized(hierarchical=False, communication_interval=interval))
    train_all(members, STEPS, Shares.even(size))
    for worker, expected in zip(members, reference(size, interval), strict=True):
        for step, (got, wanted) in enumerate(zip(worker.seen, expected, strict=True)):
            distances = (got - wanted).abs()
            differing = int((distances > TOLERANCE).sum())
            assert differing <= ROUNDED_OTHERWISE, f"interval {interval}, step {step}: {distances.max()}"
