"""Provides samplers that give all replicas samples of like complexity at the same time, under the original's names.

For plain scripts with torch's DataLoader and a fixed number of replicas; no launcher is needed. In elastic jobs
ElasticDataLoader balances itself (its `balance` argument). Which samples come together is decided by
balancing/replica_order.py; their complexities are computed by complexities.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from bagua_contract.environment import WorkerEnvironment
from bagua_core.data.balancing.complexities import Complexities
from bagua_core.data.balancing.epoch_batches import Limits
from bagua_core.data.balancing.replica_order import samples_per_replica, side_by_side, within_budget
from bagua_core.torch_api import communication

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Yields the indices of one replica; whatever the others draw at the same place is about as complex.

    sampler = LoadBalancingDistributedSampler(dataset, complexity_fn=lambda sample: len(sample[0]))
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float] | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
        *,
        complexities: Sequence[float] | None = None,
        cache_dir: str | Path | None = None,
        cache_key: str = "",
    ) -> None:
        """Takes the data set and how its samples are ordered.

        complexity_fn: of a sample, at least 0; called when the first index is drawn, once for every sample.
        num_replicas, rank: of torch's default process group, or the job's workers, or 1 and 0.
        shuffle: another order in each epoch, which follows from `seed` and the epoch.
        drop_last: leave out the samples that do not fill a place on every replica, else some are used twice.
        random_level: 0 (best balance) to 1 (hardly any); how much chance has in which samples come together.
        complexities, cache_dir, cache_key: see bagua_core.Balance.

        Raises ValueError, TypeError.
        """
        if not 0 <= random_level <= 1:
            raise ValueError(f"random_level={random_level} is not between 0 and 1")
        self.num_replicas, self.rank = _place(num_replicas, rank)
        self.dataset = dataset
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.random_level = random_level
        self.epoch = 0
        self.num_samples = samples_per_replica(len(dataset), self.num_replicas, drop_last)
        self.total_size = self.num_samples * self.num_replicas
        self._complexities = Complexities(
            dataset,
            complexity_fn,
            known=complexities,
            seed=seed,
            cache_dir=cache_dir,
            cache_key=cache_key,
        )
        self._rows: tuple[int, list[list[int]]] | None = None

    def __iter__(self) -> Iterator[int]:
        return iter([row[self.rank] for row in self.rows()])

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. Call it before every epoch, or all epochs have one order."""
        self.epoch = epoch

    def rows(self) -> list[list[int]]:
        """Returns what all replicas use side by side in this epoch: a list of `num_replicas` indices for each place."""
        if self._rows is None or self._rows[0] != self.epoch:
            rows = side_by_side(
                self.complexities(),
                self.num_replicas,
                seed=self.seed,
                epoch=self.epoch,
                shuffle=self.shuffle,
                drop_last=self.drop_last,
                random_level=self.random_level,
            )
            self._rows = (self.epoch, rows)
        return self._rows[1]

    def complexities(self) -> list[float]:
        """Returns the complexity of every sample, by index."""
        self._complexities.complete()
        return self._complexities.of(range(len(self.dataset)))


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Yields batches of varying size, the same number on every replica.

    Either `batch_fn` makes each replica's batches from its indices, or `budget` does: every step then has samples of at
    most `budget` times the replicas, dealt out so that all have about the same.

        batches = LoadBalancingDistributedBatchSampler(sampler, budget=4096, max_batch_size=64)
        loader = DataLoader(dataset, batch_sampler=batches)
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], list[list[int]]] | None = None,
        drop_last: bool = False,
        *,
        budget: float | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """Takes the sampler, and either batch_fn or budget.

        batch_fn: from a replica's indices in order to a list of batches; every replica calls it for all, so it must be
        the same.
        drop_last: with batch_fn, end with the replica that has the fewest batches, else the others' are used again;
        with a budget, leave out steps that have fewer samples than replicas.
        budget: complexity of a replica's batch.
        max_batch_size: its most samples.

        Raises TypeError, ValueError.
        """
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise TypeError(f"sampler={sampler!r} is no LoadBalancingDistributedSampler")
        if (batch_fn is None) == (budget is None):
            raise TypeError("a batch sampler takes batch_fn or budget: one of them, not both")
        if budget is not None and not budget > 0:
            raise ValueError(f"budget={budget} must be above 0")
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(f"max_batch_size={max_batch_size} must be at least 1")
        if budget is None and max_batch_size is not None:
            raise TypeError("max_batch_size goes with budget: batch_fn decides for itself")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.budget, self.max_batch_size = budget, max_batch_size
        self._batches: list[list[int]] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._made())

    def __len__(self) -> int:
        """Returns the number of batches of this epoch."""
        return len(self._made())

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch. Call it before every epoch, on every replica."""
        self.sampler.set_epoch(epoch)
        self._batches = None

    def _made(self) -> list[list[int]]:
        if self._batches is None:
            self._batches = self._by_function() if self.batch_fn is not None else self._by_budget()
        return self._batches

    def _by_function(self) -> list[list[int]]:
        assert self.batch_fn is not None
        rows = self.sampler.rows()
        made = [self.batch_fn([row[rank] for row in rows]) for rank in range(self.sampler.num_replicas)]
        counts = [len(batches) for batches in made]
        if min(counts) == 0 and max(counts) > 0 and not self.drop_last:
            raise ValueError(
                f"batch_fn made no batch for replica {counts.index(0)}: there is none to use again"
            )
        own = made[self.sampler.rank]
        if self.drop_last:
            return own[: min(counts)]
        return [own[number % len(own)] for number in range(max(counts))]

    def _by_budget(self) -> list[list[int]]:
        assert self.budget is not None
        sampler = self.sampler
        known = sampler.complexities()
        # each sample once: a row that was filled up has some twice
        indices = list(dict.fromkeys(index for row in sampler.rows() for index in row))
        replicas = sampler.num_replicas
        most = len(indices) if self.max_batch_size is None else self.max_batch_size * replicas
        steps = within_budget(
            indices,
            [known[index] for index in indices],
            replicas,
            Limits(max(1, most), self.budget * replicas),
            self.drop_last,
        )
        return [step[sampler.rank] for step in steps]


def _is_jobs_world() -> bool:
    return WorkerEnvironment.is_present(os.environ) and not (dist.is_available() and dist.is_initialized())


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Returns (number of replicas, this replica's rank). Raises ValueError for a rank that does not exist."""
    replicas, own = 1, 0
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            replicas, own = dist.get_world_size(), dist.get_rank()
        elif _is_jobs_world():
            replicas, own = communication.get_world_size(), communication.get_rank()
    replicas = replicas if num_replicas is None else num_replicas
    own = own if rank is None else rank
    if replicas < 1 or not 0 <= own < replicas:
        raise ValueError(f"rank={own} is not among num_replicas={replicas}: ranks 0 to {replicas - 1}")
    return replicas, own
