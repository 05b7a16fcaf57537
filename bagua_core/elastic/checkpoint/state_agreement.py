"""Decides whether the workers that end a job hold one state, so that their parts make one checkpoint. Pure.

A script may change the model on some workers after the last step, as where rank 0 puts averaged weights into it to save
them. Stripes of such states would be whole and agree in their headers, and be of no state that any worker had.
"""

from __future__ import annotations

from collections.abc import Sequence

NOT_KNOWN = (0, 0)
"""The digests of a worker that had no memory to compare its state, or need not: it alone writes."""

NO_CHECKPOINTS = (0, 1)
"""The digests of a worker without a checkpoint directory."""


def difference(digests: Sequence[tuple[int, int]], shards: int) -> str:
    """Returns which ranks differ and in what; empty if the workers with each shard hold the same.

    digests: of the layout and the values of each worker's state, by rank. shards: of a replica; rank r holds shard
    r modulo shards.
    """
    if all(of_one in (NOT_KNOWN, NO_CHECKPOINTS) for of_one in digests):
        return ""
    if without := [rank for rank, of_one in enumerate(digests) if of_one == NO_CHECKPOINTS]:
        return f"ranks {without} have no --checkpoint-dir"
    if unknown := [rank for rank, of_one in enumerate(digests) if of_one == NOT_KNOWN]:
        return f"ranks {unknown} had no memory to compare their state with that of the others"
    for what, of in (("names, types, shapes or devices of tensors", 0), ("values of tensors", 1)):
        for shard in range(shards):
            ranks: dict[int, list[int]] = {}
            for rank in range(shard, len(digests), shards):
                ranks.setdefault(digests[rank][of], []).append(rank)
            if len(ranks) > 1:
                return (
                    f"the {what} differ between ranks {' and '.join(map(str, ranks.values()))}. After the last step "
                    "change the model and its optimizers on all workers alike, or change a copy"
                )
    return ""
