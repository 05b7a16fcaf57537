"""Divides an epoch into global batches: by number, by a budget of complexity, and by similarity.

Pure: the same (order, complexities, limits, seed) give the same batches on every machine, whatever the workers are.
Invariant: every sample of the order is in exactly one batch, but for a last short one that is dropped on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bagua_core.data.partition import mixed_seed

_Complexity = Callable[[Sequence[int]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a batch.

    most: samples of a batch. budget: complexity of a batch, None for none; a sample that is beyond it alone has a
    batch of its own. similar: samples are sorted by complexity within runs of so many full batches; 1 leaves
    the order alone.
    """

    most: int
    budget: float | None = None
    similar: int = 1

    @property
    def needs_complexities(self) -> bool:
        return self.budget is not None or self.similar > 1


class EpochBatches:
    """Holds the samples in the order of use, and where each batch starts."""

    def __init__(self, order: torch.Tensor, starts: list[int]) -> None:
        self.order = order
        self._starts = starts  # one more than there are batches

    def __len__(self) -> int:
        return len(self._starts) - 1

    def size(self, batch: int) -> int:
        return self._starts[batch + 1] - self._starts[batch]

    def indices(self, batch: int) -> list[int]:
        return self.order[self._starts[batch] : self._starts[batch + 1]].tolist()


def epoch_batches(
    order: torch.Tensor,
    complexities: _Complexity,
    limits: Limits,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    drop_last: bool,
) -> EpochBatches:
    """Divides the samples of an epoch into batches within the limits.

    order: [samples], as without balancing. complexities: of the samples of these indices; called only if the
    limits need them. shuffle: the similar batches of a run come in random order, by (seed, epoch).
    """
    samples, last = order, list[list[int]]()
    whole = order.numel() // limits.most * limits.most
    if limits.budget is None:
        # the short batch is of the same samples as without balancing: sorted, it would always be the largest
        last = [] if drop_last or whole == order.numel() else [order[whole:].tolist()]
        order = order[:whole]
    if not limits.needs_complexities:
        kept = whole if drop_last else samples.numel()
        return EpochBatches(samples[:kept], [*range(0, kept, limits.most), kept])
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch, 1))
    batches: list[list[int]] = []
    left: list[int] = []
    runs = _runs(order, complexities, limits)
    for number, run in enumerate(runs):
        run = left + run
        costs = complexities(run)
        if limits.similar > 1:
            # the largest first, so that what is left over in the end is small and can still be dealt out evenly
            ranked = sorted(range(len(run)), key=lambda place, costs=costs: -costs[place])  # type: ignore[misc]
            run, costs = [run[place] for place in ranked], [costs[place] for place in ranked]
        made = packed(run, costs, limits)
        if limits.budget is not None and number + 1 < len(runs):
            left = made.pop()
        if limits.similar > 1 and shuffle:
            made = [
                made[place] for place in torch.randperm(len(made), generator=generator, device="cpu").tolist()
            ]
        batches += made
    return _of(batches + last)


def packed(indices: Sequence[int], costs: Sequence[float], limits: Limits) -> list[list[int]]:
    """Returns batches of neighbours, each as large as the limits allow. costs: of each index."""
    batches: list[list[int]] = []
    batch: list[int] = []
    total = 0.0
    for index, cost in zip(indices, costs, strict=True):
        beyond = limits.budget is not None and total + cost > limits.budget
        if batch and (beyond or len(batch) == limits.most):
            batches.append(batch)
            batch, total = [], 0.0
        batch.append(index)
        total += cost
    if batch:
        batches.append(batch)
    return batches


def _runs(order: torch.Tensor, complexities: _Complexity, limits: Limits) -> list[list[int]]:
    """Splits the order into runs that hold about `similar` full batches each; one run if nothing is sorted."""
    indices = order.tolist()
    if limits.similar == 1:
        return [indices]
    most = limits.most * limits.similar
    if limits.budget is None:
        return [indices[at : at + most] for at in range(0, len(indices), most)]
    runs = []
    start, total = 0, 0.0
    for at, cost in enumerate(complexities(indices), start=1):
        total += cost
        if total >= limits.budget * limits.similar or at - start == most:
            runs.append(indices[start:at])
            start, total = at, 0.0
    if start < len(indices):
        runs.append(indices[start:])
    return runs


def _of(batches: list[list[int]]) -> EpochBatches:
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + len(batch))
    return EpochBatches(
        torch.tensor([index for batch in batches for index in batch], dtype=torch.int64, device="cpu"), starts
    )
