"""The data loader of an elastic job: splits each step's global batch over the workers.

Owns the iteration (when boundaries are asked for, which micro-batches a step yields) and this rank's
view of the position; commits, roll-backs and heals are the engine's, which moves the position with
`seek`. How batches divide is division.py's: what is yielded is a pure function of (seed, epoch, batch, step plan).
Invariant: one boundary per step.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

from bagua_core.communication.step_interface import MicroBatch, StepEngine, StepPlan
from bagua_core.data import loader_arguments, own_counters, stream_division
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.division import NO_PIECE, DivisionSettings, EvenDivision, Piece, indices_of_share
from bagua_core.data.division_choice import choose_division
from bagua_core.data.loader_shards import LoaderShards
from bagua_core.data.prefetch import BatchKey, Prefetcher
from bagua_core.data.replica_parts import ReplicaParts
from bagua_core.data.rounds.open_round import Rounds
from bagua_core.data.sample_seeding import has_no_randomness, own_process_seed
from bagua_core.data.stream_division import StreamDivision, is_stream
from bagua_core.errors import TrainingOver


class ElasticDataLoader:
    """A data loader with torch.utils.data.DataLoader's arguments, but `global_batch_size` for `batch_size`.

        for epoch in loader.epochs(10):
            for inputs, targets in loader:
                ...

    After a `break` or an exception the step under way is committed at the next boundary, and the same epoch continues.
    A batch that is drawn and not trained on is used up. All workers must break at the same step. A worker without a
    share (a joiner's first step, or fewer samples than workers) gets at most two samples, whose gradient is replaced.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        *,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        sampler: Any = None,
        max_local_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = True,
        seed_samples: bool = True,
        balance: Balance | None = None,
        divide_in_replica: Any = True,
        engine: StepEngine | None = None,
        **others: Any,
    ) -> None:
        """Checks the arguments; worker processes start later.

        dataset: map-style, or a stream: an IterableDataset or another object that is only iterated.
        global_batch_size: samples of a step, over all workers.
        seed: what orders and random numbers follow from; equal on all workers.
        drop_last, num_workers, collate_fn, pin_memory, prefetch_factor, worker_init_fn: as for DataLoader.
        timeout, multiprocessing_context, persistent_workers, others: DataLoader's; timeout in s. Others are refused.
        shuffle: True unless given; a stream has its own order.
        sampler: gives the order of an epoch, for all workers together, in place of `shuffle`.
        max_local_batch_size: a larger share is split into micro-batches whose gradients add up.
        seed_samples: random numbers drawn while a sample is read, or samples are collated, follow from (seed, epoch,
        sample).
        balance: shares of equal cost instead of equal size. With a budget global_batch_size is the most samples of
        a step. divide_in_replica: with --replica-size, see replica_parts.py.
        Raises TypeError or ValueError, naming the value, for what an elastic job cannot have.
        """
        loader_arguments.refuse(others, dataset)
        global_batch_size = loader_arguments.require_sizes(global_batch_size, max_local_batch_size)
        loader_arguments.refuse_together(sampler, balance, num_workers, persistent_workers)
        self.dataset = dataset
        self.seed = seed
        streams = is_stream(dataset)
        if streams:
            stream_division.refuse(dataset, shuffle, num_workers, sampler, balance)
        self.shuffle = shuffle = not streams if shuffle is None else shuffle
        self.drop_last = drop_last
        self.max_local_batch_size = max_local_batch_size
        self._global_batch_size = global_batch_size
        self._length = None if streams else len(dataset)
        sample_seed = seed if seed_samples and (collate_fn or not has_no_randomness(dataset)) else None
        settings = DivisionSettings(seed, shuffle, drop_last, global_batch_size, max_local_batch_size)
        self._division = division = choose_division(
            dataset, self._length, sampler, balance, settings, sample_seed
        )
        if sampler is None and self._length is not None:
            loader_arguments.require_batch(self._length, global_batch_size, drop_last)
        self._parts = ReplicaParts(divide_in_replica)
        self._epoch = self._batch = 0
        self._shards: LoaderShards | None = None  # in a deterministic job
        self._shard_settings = (seed, seed_samples, max_local_batch_size)
        self._rounds: Rounds | None = None  # where the round is the unit of commit
        self._next_plan: StepPlan | None = None  # its boundary was taken, its step has not begun
        self._announced: int | None = None  # the epoch that epochs() has yielded, until its first draw
        self._left_early: int | None = None  # the epoch whose iteration has not come to its end
        self._has_more_of_step = False  # micro-batches, behind the one that was yielded
        self._looks_again = False  # the plan was taken a while ago: a loss may have come since
        self._steady = (0, 1)  # rank and world size of the plan last taken, for the prediction
        self._wanted: dict[BatchKey, Piece] = {}  # the micro-batch that is being read
        self._iteration = 0
        self.job_steps = 0
        self._iterator: Callable[[], Iterator[Any] | None] = lambda: None  # the newest one, while it lives
        self._looked_for_enumerate = False
        self._prefetcher = Prefetcher(
            division.reader if isinstance(division, StreamDivision) else dataset,
            self,
            sample_seed=sample_seed,
            process_seed=seed if seed_samples else own_process_seed(seed),
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
        )
        division.orders_change = self._prefetcher.forget
        self._engine = engine
        self._is_over = False
        self._attached = False  # the loader that is iterated, not one that is only made, is the job's

    # -- for the training script

    def __len__(self) -> int:
        """Returns the steps of the epoch that the job is in; with a budget epochs differ a little.

        Raises TypeError for a stream without __len__.
        """
        return self._division.batch_count(self._epoch)

    def total_steps(self, epochs: int) -> int:
        """Returns the steps of the first `epochs` epochs, for schedules that need their number."""
        return sum(self._division.batch_count(epoch) for epoch in range(epochs))

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the job's epochs, from the current one up to count - 1, and then ends the job.

        A joiner begins with the epoch that the others are in. An epoch comes again if its loop was left early. Raises
        RuntimeError for one of which no batch was asked for.
        """
        self.job_steps = 0 if self._rounds is not None else self._division.known_steps(count)
        while True:
            if self._next_plan is None:
                self._take_boundary()
            if self._epoch < count:
                self._announced = self._epoch
                self._attached_engine().epoch_begins(self._epoch)
                yield self._epoch
                self._attached_engine().epoch_ends()
                if self._announced is not None:
                    raise RuntimeError(
                        f"epoch {self._announced} was not iterated, and would be yielded for ever: epochs() begins "
                        "where the job is, so leave out what skips epochs; `break` ends the loop"
                    )
            elif self._attached_engine().finish():
                return
            else:
                self._next_plan = None  # left out and taken in again: the job may have steps to do

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches that are left of the epoch that `epochs` named, or else of the job's current one."""
        epoch = self._announced
        if epoch is None and self._rounds is not None:
            # Workers break a round at different places, and its end may be the epoch's: none of them runs ahead.
            epoch = self._left_early
        self._iteration += 1
        iterator = self._iterate(epoch, self._iteration)
        self._iterator = weakref.ref(iterator)
        return iterator

    def enumerate(self, start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yields (index, batch) pairs like the built-in enumerate, with the job's own position for the index.

        The index is `start` plus the number of steps of this epoch that are committed. All workers see the same one, a
        worker that joined and a step that is done again included. Micro-batches of one step have the same index.
        """
        for batch in self:
            yield start + self._batch, batch

    @property
    def step(self) -> int:
        """The number of steps that the job has committed, the same on all workers; 0 before the first one.

        In the loop body this is the number of the step under way, counted from 0 over all epochs.
        """
        return self._attached_engine().plan.step

    @property
    def committed_samples(self) -> int:
        """Samples that committed steps or rounds have used, over all epochs; equal on all workers, 0 before the first.

        For a schedule of the learning rate that depends on the job's progress and not on how many steps this worker has
        taken. Within a round it does not change. Raises TypeError where the samples of a batch are not known beforehand
        (a stream, a sampler, balance).
        """
        if self._rounds is not None:
            return self._rounds.committed_samples
        return self._division.samples_before(self._epoch, self._batch)

    def end_step(self, *, confirmed: bool = False) -> bool:
        """Ends the current step or round here, and not at the next draw: for loops that do something between two.

        confirmed: return only once all workers have committed it, so that what follows is done by all of them.
        Returns whether the job's position has moved; if it has not, the step failed, and the next draw serves it again.
        Raises RuntimeError within a step of several micro-batches, before the last one.
        """
        if self._has_more_of_step:
            raise RuntimeError(
                "end_step() before the step's last micro-batch: its other samples would be left out; call it once "
                "the batches of max_local_batch_size that the step has are drawn and trained on"
            )
        before = self.position()
        if self._rounds is not None:
            self._rounds.pause(time.monotonic())
        self._take_boundary(goes_on=True, confirmed=confirmed)
        self._looks_again = True
        return self.position() != before

    @property
    def has_share(self) -> bool:
        """Whether this worker has samples of the step, and not a filler; for the loop body.

        With max_local_batch_size it is of the whole step: micro-batches of a worker with samples may be fillers too.
        """
        plan = self._attached_engine().plan
        if self._rounds is not None:
            return self._rounds.has_work
        return bool(self._parts.of(self.samples_of(self.position(), plan, plan.global_rank)))

    @property
    def is_at_step_end(self) -> bool:
        """Whether the current batch is the last one of its step on this worker, behind which the optimizer acts.

        False before the last micro-batch of a step, and before a worker's last virtual shard in a deterministic job.
        """
        return not self._has_more_of_step

    @property
    def is_at_last_batch(self) -> bool:
        """Whether the current batch is its epoch's last one.

        A worker that joins on a stream, or with a sampler whose state decides an epoch's length, knows it once it has
        copied the job's state: from the end of its first backward on. Raises TypeError in rounds, where no worker knows
        it.
        """
        if self._rounds is not None:
            raise TypeError(
                "is_at_last_batch is not known in rounds, whose workers lease an epoch's samples as they go; every "
                "local batch is an optimizer's step of its own"
            )
        return not self._division.has_batch(self._epoch, self._batch + 1)

    def close(self) -> None:
        """Stops the loader's worker processes, within a few seconds."""
        self._prefetcher.close()

    def training_over(self) -> None:
        """Ends this loader's training and closes the loader; see step_interface.DataSource."""
        self._is_over = True
        self.close()

    @property
    def worker_process_ids(self) -> list[int]:
        """The process ids of the loader's worker processes; empty without num_workers."""
        return self._prefetcher.worker_process_ids

    def _iterate(self, epoch: int | None, iteration: int) -> Iterator[Any]:
        engine = self._attached_engine()
        self._looks_again = True
        drawn: int | None = None  # what enumerate gives to the next draw, less where the first one began
        while True:
            if iteration != self._iteration:
                raise RuntimeError("this iteration has ended: the loader was iterated again meanwhile")
            self._announced = None  # at every draw: the iterator may be older than what epochs() yielded last
            if self._next_plan is None or self._looks_again:
                # A plan kept since the boundary that ended the last epoch may be of a generation that was
                # lost since, in an evaluation say. A boundary before the step begins only looks again.
                self._take_boundary()
            self._looks_again = False
            plan = self._next_plan
            assert plan is not None
            if epoch is None:
                epoch = self._epoch
            self._left_early = epoch
            if self._epoch != epoch:
                self._left_early = None
                # Forward at the epoch's end. Backward for a worker that was left out after a commit that
                # the others then did without it.
                return
            if self._rounds is not None:
                yield from self._round(self._rounds, plan, iteration)
                continue
            batch = self._batch
            active_index, active_count = plan.active_index, plan.active_count
            if active_index is not None:
                self._division.read(epoch, batch)
            micro_batches = self._division.micro_batches(epoch, batch, active_count, active_index)
            for micro in range(micro_batches):
                key = BatchKey(active_index, active_count, epoch, batch, micro)
                piece = NO_PIECE if active_index is None else self._division.piece(key)
                self._wanted = {key: piece}
                data = self._read(key)
                # only now: a sample that cannot be read leaves the step unbegun
                self._next_plan = None
                shard = (None, 0) if self._shards is None else self._shards.of(key)
                parts = self._parts.weights(len(piece.indices))
                engine.begin_micro_batch(MicroBatch(piece.weight, micro == micro_batches - 1, *shard, *parts))
                if drawn is None:
                    # An iteration that begins again after a break counts from 0 in one process too.
                    drawn = 0 if iteration == 1 else batch
                if drawn != batch and micro_batches == 1:
                    self._warn_if_enumerated(drawn)
                drawn += 1
                self._has_more_of_step = micro != micro_batches - 1
                try:
                    yield data
                finally:  # a break gives the rest up
                    self._has_more_of_step = False
                del data  # the script's batch must not live on while the next one is loaded
                if iteration != self._iteration:
                    raise RuntimeError("this iteration has ended: the loader was iterated again meanwhile")

    def _round(self, rounds: Rounds, plan: StepPlan, iteration: int) -> Iterator[Any]:
        """Yields this worker's lease of one round, a local batch at a time."""
        engine = self._attached_engine()
        batches = rounds.open(plan)
        for batch in range(batches):
            data = self._read(rounds.key(batch))
            self._next_plan = None
            engine.begin_micro_batch(
                MicroBatch(1.0, True, None, 0, *self._parts.weights(rounds.samples_in(batch)))
            )
            rounds.draw(batch, time.monotonic())
            yield data
            del data
            if self._next_plan is not None:
                return  # end_step() closed the round, and the rest of the lease with it
            rounds.pause(time.monotonic())
            if iteration != self._iteration:
                raise RuntimeError("this iteration has ended: the loader was iterated again meanwhile")
            if engine.closes_round_early():
                break
        if not batches:  # it copies the state, or came to the end of an epoch: it takes part in the average
            self._next_plan = None
            engine.begin_micro_batch(MicroBatch(0.0, True))

    def _read(self, key: BatchKey) -> Any:
        """Returns the micro-batch `key`. Called before it begins, in order."""
        return self._prefetcher.take(key)

    def _warn_if_enumerated(self, drawn: int) -> None:
        """Warns, at most once per loader, of a script that counts its draws: their number is not the job's position."""
        if not self._looked_for_enumerate:
            self._looked_for_enumerate = True
            own_counters.warn_if_enumerated(sys._getframe(2).f_code, self._iterator(), drawn, self._batch)

    def _take_boundary(self, goes_on: bool = False, confirmed: bool = False) -> None:
        engine = self._attached_engine()
        # before the first boundary: no other worker waits for our processes to start
        self._prefetcher.start()
        self._next_plan = plan = engine.boundary(goes_on, confirmed)
        self._steady = (plan.global_rank, plan.world_size)
        if self._shards is not None:
            self._shards.boundary(plan)

    def _attached_engine(self) -> StepEngine:
        if self._is_over:
            raise TrainingOver("bagua.shutdown() ended this loader's training; make a new ElasticDataLoader")
        engine = self._engine
        if engine is None:
            # late: a loader that is only made (and in tests one with its own engine) needs no runtime
            from bagua_core.elastic.step import runtime

            engine = self._engine = runtime.engine()
        if not self._attached:
            self._parts.join(engine)
            self._division.prepare()
            if engine.virtual_shards:
                self._shards = LoaderShards(self._division, engine.virtual_shards, *self._shard_settings)
                self._division = self._shards.division
            if (steps := engine.round_steps) is not None:
                is_even = type(self._division) is EvenDivision
                loader_arguments.refuse_rounds(is_even, self.max_local_batch_size)
                division = cast("EvenDivision", self._division)
                self._rounds = Rounds(division.used_length, steps, self._global_batch_size, division.order)
            engine.attach_source(self)
            own = {} if self._rounds is None else {"bagua.rounds": self._rounds}
            for name, state in {**self._division.travelling(), **own}.items():
                engine.register_state(name, state)
            self._attached = True
        return engine

    # -- for the engine (DataSource)

    @property
    def place_in_replica(self) -> tuple[int, int]:
        """This worker's place among those of its replica that get samples of their own, and their number."""
        return self._parts.place

    @property
    def rounds(self) -> Rounds | None:
        """The leases of a job whose unit of commit is the round; None where it is the step."""
        return self._rounds

    @property
    def global_batch_size(self) -> int:
        """The samples of a step of the whole job."""
        return self._global_batch_size

    def fingerprint(self) -> dict[str, str]:
        """Returns what must be equal on all workers; a joiner that differs is refused with the difference."""
        return {
            "dataset_length": "unknown" if self._length is None else str(self._length),
            "global_batch_size": str(self._global_batch_size),
            "max_local_batch_size": str(self.max_local_batch_size),
            "seed": str(self.seed),
            "shuffle": str(self.shuffle),
            "drop_last": str(self.drop_last),
            **({} if self._rounds is None else self._rounds.fingerprint()),
            **self._division.fingerprint(),
        }

    def position(self) -> dict[str, int]:
        """Returns the next batch, by epoch and number: the part of a checkpoint that says where the data continues."""
        return {"epoch": self._epoch, "batch": self._batch}

    def seek(self, position: dict[str, int]) -> None:
        """Moves to `position`. Raises ValueError for a batch that no epoch has."""
        epoch, batch = position["epoch"], position["batch"]
        # The beginning of an epoch that the job may not have, as at its end, is not asked of a sampler.
        known = batch == 0 or self._rounds is not None or self._division.may_have_batch(epoch, batch)
        if epoch < 0 or batch < 0 or not known:
            raise ValueError(f"position {position} is another job's: no such batch is in this one's epochs")
        self._epoch, self._batch = epoch, batch

    def after(self, position: dict[str, int]) -> dict[str, int]:
        """Returns the position behind the batch at `position`."""
        if self._rounds is not None:
            return self._rounds.position  # the round at `position` is closed by now
        return dict(zip(("epoch", "batch"), self._after(**position), strict=True))

    def sample_count(self, position: dict[str, int]) -> int:
        """Returns the samples of all workers in the batch at `position`, or in the closed round there."""
        rounds = self._rounds
        return self._division.samples(**position) if rounds is None else rounds.sample_count(position)

    def samples_of(self, position: dict[str, int], plan: StepPlan, global_rank: int) -> list[int]:
        """Returns the data set's indices that a rank processes in the batch at `position`; none if it has no share."""
        if self._rounds is not None:
            return self._rounds.samples_of(position, global_rank)
        active_index = plan._replace(global_rank=global_rank).active_index
        if active_index is None:
            return []
        first = BatchKey(active_index, plan.active_count, position["epoch"], position["batch"], 0)
        return indices_of_share(self._division, first)

    # -- for the prefetcher (Plan)

    def indices_of(self, key: BatchKey) -> list[int]:
        """Returns the indices to load for `key`. A worker without a share loads filler samples, which do not count."""
        return self._own_indices(key) or self._division.filler(key.epoch)[: self.max_local_batch_size]

    def _own_indices(self, key: BatchKey) -> list[int]:
        """Returns the indices of this worker's samples in `key`; none if the micro-batch is a filler."""
        if self._rounds is not None:
            return self._parts.of(self._rounds.indices_of(key))
        piece = self._wanted.get(key) or (NO_PIECE if key.active_index is None else self._division.piece(key))
        return self._parts.of(piece.indices)

    def following(self, key: BatchKey) -> BatchKey | None:
        """Returns the key to load after `key`, unless a membership change comes between them; None: it can't be loaded
        ahead."""
        if self._rounds is not None:
            return self._rounds.following(key)
        index, count, epoch, batch, micro = key
        if micro + 1 < self._division.micro_batches(epoch, batch, count, index):
            return key._replace(micro=micro + 1)
        after = self._after(epoch, batch)
        if after[0] != epoch and not self._division.orders_ahead:
            return None
        # a worker that heals now takes its share in the next step
        return BatchKey(*self._steady, *after, 0)

    def _after(self, epoch: int, batch: int) -> tuple[int, int]:
        return (epoch, batch + 1) if self._division.has_batch(epoch, batch + 1) else (epoch + 1, 0)
