"""Gives an elastic loader the virtual shards of a deterministic job, and refuses what has no fixed order."""

from __future__ import annotations

import sys

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.division import Division, EvenDivision
from bagua_core.data.prefetch import BatchKey
from bagua_core.data.shard_division import ShardDivision
from bagua_core.elastic.step.step_seed import seed_between_steps
from bagua_core.errors import NotDeterministicError


class LoaderShards:
    """The virtual shards of one loader. Its `division` is the loader's own, with the batches cut into shards."""

    def __init__(
        self,
        division: Division,
        most_shards: int,
        seed: int,
        seeds_samples: bool,
        max_local_batch_size: int | None,
    ) -> None:
        """Takes the division that the loader was created with. Raises NotDeterministicError."""
        if not isinstance(division, EvenDivision):
            raise NotDeterministicError(
                "a deterministic job cuts batches of one size into virtual shards, which a stream "
                "(IterableDataset) and "
                "balance= do not have; give the loader a data set with __len__ and __getitem__, and leave balance out"
            )
        if max_local_batch_size is not None:
            raise NotDeterministicError(
                f"max_local_batch_size={max_local_batch_size}: a deterministic job computes one virtual "
                "shard at a time; "
                "leave it out, and give bagua-launch more --virtual-shards if a shard is too large for the memory"
            )
        if not seeds_samples:
            raise NotDeterministicError(
                "seed_samples=False: random numbers drawn while a sample is read would depend on the process "
                "that reads it; leave seed_samples out"
            )
        self.division = ShardDivision(division, most_shards)
        self._most_shards = most_shards
        self._seed = seed
        self._has_warned = False

    def of(self, key: BatchKey) -> tuple[int | None, int]:
        """Returns the micro-batch's shard, None for a worker without any, and the number of shards of its batch."""
        return self.division.shard_of(key), self.division.shards(key.epoch, key.batch)

    def boundary(self, plan: StepPlan) -> None:
        """Seeds the random numbers drawn between two steps, so that all workers draw the same ones."""
        seed_between_steps(self._seed, plan.step)
        if plan.active_count > self._most_shards and plan.global_rank == 0 and not self._has_warned:
            self._has_warned = True
            idle = plan.active_count - self._most_shards
            print(
                f"bagua: warning: {plan.active_count} workers and {self._most_shards} virtual shards: {idle} "
                "workers are idle in each step; the number of shards is fixed for the job's life (--virtual-shards)",
                file=sys.stderr,
                flush=True,
            )
