"""Orders a data set for a fixed number of replicas, which get samples of like complexity at the same time.

Pure; the samplers in torch_api/contrib are its shell. Invariants: every replica has the same number of samples; all of
the data set is used, but for what is dropped, and up to one sample for each replica less one is used twice if not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua_core.data.balancing.epoch_batches import Limits, packed
from bagua_core.data.balancing.fair_shares import fair_shares
from bagua_core.data.partition import mixed_seed


def samples_per_replica(length: int, replicas: int, drop_last: bool) -> int:
    return length // replicas if drop_last else -(-length // replicas)


def side_by_side(
    complexities: Sequence[float],
    replicas: int,
    *,
    seed: int,
    epoch: int,
    shuffle: bool,
    drop_last: bool,
    random_level: float,
) -> list[list[int]]:
    """Returns rows of `replicas` indices, which the replicas use at the same time, in order of use.

    complexities: of every sample. random_level: 0 to 1; noise of so much of the complexities' range is added before
    samples are sorted, so that rows differ from epoch to epoch.
    """
    length = len(complexities)
    generator = torch.Generator().manual_seed(mixed_seed(seed, epoch, 2))
    keys = torch.tensor(complexities, dtype=torch.float64, device="cpu")
    if shuffle and random_level > 0 and length:
        noise = torch.rand(length, generator=generator, dtype=torch.float64, device="cpu")
        keys = keys + noise * (random_level * (keys.max() - keys.min()))
    # among equals by chance, else they would be neighbours for ever
    before = (
        torch.randperm(length, generator=generator, device="cpu")
        if shuffle
        else torch.arange(length, dtype=torch.int64, device="cpu")
    )
    extra = length % replicas
    if drop_last and extra:
        before = before[: length - extra]  # whichever come last, not the most complex
    ranked = before[torch.argsort(keys[before], stable=True)].tolist()
    if not drop_last and extra:
        missing = replicas - extra
        # about as complex as the rest of their row, and not the same
        again = (
            ranked[-replicas:-extra] if length > replicas else [ranked[i % length] for i in range(missing)]
        )
        ranked = ranked + again
    rows = [ranked[at : at + replicas] for at in range(0, len(ranked), replicas)]
    if shuffle:
        # no replica always has the most complex one of its row
        rows = [
            [row[i] for i in torch.randperm(replicas, generator=generator, device="cpu").tolist()]
            for row in rows
        ]
        rows = [rows[i] for i in torch.randperm(len(rows), generator=generator, device="cpu").tolist()]
    return rows


def within_budget(
    indices: Sequence[int],
    complexities: Sequence[float],
    replicas: int,
    limits: Limits,
    drop_last: bool,
) -> list[list[list[int]]]:
    """Returns the batches of every replica: [steps][replicas] lists of indices, of about equal complexity in a step.

    complexities: of each of `indices`, in their order. limits: of a step, all replicas together. A step of
    fewer samples than replicas is dropped, or its smallest sample is used again by those that have none.
    """
    place_of = {index: place for place, index in enumerate(indices)}
    most_each = -(-limits.most // replicas)
    steps = []
    for batch in packed(indices, complexities, limits):
        if len(batch) < replicas:
            if drop_last:
                continue
            smallest = min(batch, key=lambda index: (complexities[place_of[index]], index))
            steps.append([[index] for index in batch] + [[smallest]] * (replicas - len(batch)))
            continue
        own = [complexities[place_of[index]] for index in batch]
        shares = fair_shares(own, replicas, least=1, most=most_each)
        steps.append([[batch[place] for place in share] for share in shares])
    return steps
