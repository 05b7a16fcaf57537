"""QAdam after the papers, slowly and in one process: the reference of test_momentum_arithmetic.py.

Each worker has a momentum of its own and error feedback, the owner of each chunk has error feedback for the sum; see
1-bit Adam (arXiv 2102.02888), algorithm 1. Shares the compression of single tensors with the code that is tested, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bagua_core import kernels
from bagua_core.communication.compressed.compression import STRETCH


def lossy(rows: Tensor, bits: int) -> Tensor:
    """What comes out of compression, each row by itself."""
    out = torch.empty_like(rows)
    if bits == 8:
        return kernels.minmax_decompress(kernels.minmax_compress(rows), out)
    kernels.one_bit_decompress(kernels.one_bit_compress(rows, torch.zeros_like(rows)), out)
    return out.mul_(STRETCH)


class PlainQAdam:
    """One bucket of `elements`; betas: [elements] each. weights: the workers' shares of the batch."""

    def __init__(
        self,
        elements: int,
        betas: tuple[Tensor, Tensor],
        weights: Sequence[float],
        warmup_steps: int,
        bits: int | None,
        eps: float = 1e-8,
    ) -> None:
        """bits None: the bucket travels uncompressed."""
        self.beta1, self.beta2 = betas
        self.weights, self.warmup_steps, self.bits, self.eps = weights, warmup_steps, bits, eps
        self.elements, self.steps = elements, 0
        self.m, self.v = torch.zeros(elements), torch.zeros(elements)
        self.agreed = torch.zeros(elements)  # the workers' momentum as it was received, in units of d
        workers = len(weights)
        self.momentum = torch.zeros(workers, elements)
        self.size = -(-elements // workers)
        self.errors = torch.zeros(workers, workers, self.size)  # worker, chunk
        self.owner_errors = torch.zeros(workers, self.size)

    def step(self, parts: Tensor) -> Tensor:
        """parts: [workers, elements], each worker's part of the mean gradient. Returns Adam's step for a rate of 1."""
        self.steps += 1
        warm = self.steps <= self.warmup_steps
        correction2 = 1 - self.beta2 ** min(self.steps, self.warmup_steps)
        # in the first step after the warm-up the workers do not know yet which elements are late
        if self.steps <= self.warmup_steps + 1 or self.bits is None:
            gradient = parts.sum(0)
            self.m = self.beta1 * self.m + (1 - self.beta1) * gradient
            if warm:
                self.v = self.beta2 * self.v + (1 - self.beta2) * gradient**2
        else:
            d = self.v.sqrt() + self.eps * correction2.sqrt()
            if self.steps == self.warmup_steps + 2:  # each has the momentum of the steps before
                self.agreed = self.m / (1 - self.beta1) / d
                self.momentum = torch.stack([weight * self.agreed for weight in self.weights])
            before, self.agreed = self.agreed, self._exchange(parts / d)
            self.m = self.beta1 * self.m + (1 - self.beta1) * d * (self.agreed - self.beta1 * before)
        return self.m / (1 - self.beta1**self.steps) / ((self.v / correction2).sqrt() + self.eps)

    def _exchange(self, steps: Tensor) -> Tensor:
        """The sum of the workers' momentum, as all receive it."""
        assert self.bits is not None
        workers = len(self.weights)
        self.momentum = self.beta1 * self.momentum + steps
        summed = torch.zeros(workers, self.size)
        for worker in range(workers):
            chunks = torch.zeros(workers * self.size)
            chunks[: self.elements] = self.momentum[worker]
            contribution = chunks.view(workers, self.size) + self.errors[worker]
            sent = lossy(contribution, self.bits)
            self.errors[worker] = contribution - sent
            summed += sent
        contribution = summed + self.owner_errors
        sent = lossy(contribution, self.bits)
        self.owner_errors = contribution - sent
        return sent.view(-1)[: self.elements]
