"""Loads batches ahead although the split may change: one torch DataLoader, created once, and fed by an endless
sampler that predicts the next batch.

Owns the loader's worker processes and the queue of requests. What it hands out is always the batch
asked for: when the prediction was wrong (new generation, roll-back, heal) the requests under way are
marked stale, workers skip them unread, and prediction restarts; the processes survive. Knows nothing
of engines, epochs or shares: keys and their order come from its `Plan`.

Without worker processes and pinned memory the requests are read directly, in the training process.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any, NamedTuple, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    Subset,
    default_collate,
    get_worker_info,
)

from bagua_core import tracing
from bagua_core.data.partition import mixed_seed
from bagua_core.data.sample_seeding import (
    load_samples,
    load_seeded_samples,
    random_sources_kept,
    seed_random_sources,
)
from bagua_core.worker.closed_terminal import discard_output_once_closed

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
_DEATH_SEEN_WITHIN_S = 1.0
_FOR_EVER = (1 << 63) - 1


class BatchKey(NamedTuple):
    """Holds all that a micro-batch's content depends on. active_index is None for a share of 0.

    The generation is left out on purpose: one with the same split finds its batches already loaded.
    """

    active_index: int | None
    active_count: int
    epoch: int
    batch: int
    micro: int


class Plan(Protocol):
    """The split of the samples, as the Prefetcher needs it. Both methods are called in the training thread."""

    def indices_of(self, key: BatchKey) -> list[int]: ...

    def following(self, key: BatchKey) -> BatchKey | None:
        """Returns the next key if nothing changes; None if it can't be loaded ahead."""


class Request(NamedTuple):
    """A request to a worker process. serial: stale if less than the shared one."""

    serial: int
    epoch: int
    indices: list[int]


class Stale:
    """A placeholder for a batch that was not loaded because it is no longer needed."""


class LoadFailure:
    """A data set's or collate_fn's error, carried as data: it counts only if its batch is wanted."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error


class BatchReader(Dataset[Any]):
    """The data set that torch's loader sees: its 'samples' are whole micro-batches."""

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None,
        sample_seed: int | None,
        oldest_wanted: torch.Tensor | None,
    ) -> None:
        self.dataset = dataset
        self._collate_fn = default_collate if collate_fn is None else collate_fn
        self._sample_seed = sample_seed
        self._oldest_wanted = oldest_wanted
        self._epoch: int | None = None  # of the data set here, in the process that reads

    def __getitem__(self, request: Request) -> Any:
        if self._oldest_wanted is None:
            return self._read_here(request)
        if request.serial < int(self._oldest_wanted):
            return Stale()
        try:
            return self._read(request)
        except Exception:  # noqa: BLE001 - raised in the parent, if the batch is still wanted
            info = get_worker_info()
            number = "?" if info is None else info.id
            where = f"in DataLoader worker process {number}"
            return LoadFailure(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]

    def _read_here(self, request: Request) -> Any:
        if self._sample_seed is None:
            return self._read(request)
        with random_sources_kept():  # per batch: saving three states costs more than reading a sample
            return self._read(request)

    def _read(self, request: Request) -> Any:
        if request.epoch != self._epoch:
            self._epoch = None  # until it is: the data set may raise
            if self._sample_seed is not None:
                seed_random_sources(mixed_seed(self._sample_seed, request.epoch))
            _set_epoch(self.dataset, request.epoch)
            self._epoch = request.epoch
        if self._sample_seed is None:
            samples = load_samples(self.dataset, request.indices)
        else:
            samples = load_seeded_samples(self.dataset, self._sample_seed, request.epoch, request.indices)
        return self._collate_fn(samples)


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Calls set_epoch of the data set, or of those inside Subset and ConcatDataset. What the script calls on its own
    data set does not reach one in another process, nor a joiner's."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    elif isinstance(dataset, Subset):
        _set_epoch(dataset.dataset, epoch)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            _set_epoch(part, epoch)


class _WorkerStart:
    """Runs first in every worker process."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init
        self.collect_garbage = True

    def __call__(self, worker_number: int) -> None:
        # A forked child must never finalize the parent's gRPC or Gloo objects, whose threads it lacks.
        gc.freeze()
        if self.collect_garbage:
            gc.enable()
        discard_output_once_closed()  # a fork lacks the thread that does so in the training process
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, BatchReader):
            # user code expects its own data set there; WorkerInfo is frozen
            object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._user_init is not None:
            self._user_init(worker_number)


def _as_is(batch: Any) -> Any:
    return batch


class _Running:
    """Holds the torch iterator while there is one; apart from the Prefetcher so that its finalizer can stop it."""

    def __init__(self, oldest_wanted: torch.Tensor | None) -> None:
        self.iterator: Iterator[Any] | None = None
        self.oldest_wanted = oldest_wanted
        self.process_id = os.getpid()

    def stop(self) -> None:
        iterator, self.iterator = self.iterator, None
        if iterator is None or os.getpid() != self.process_id:
            return
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is None:
            return
        if self.oldest_wanted is not None:
            self.oldest_wanted.fill_(_FOR_EVER)
        processes = list(getattr(iterator, "_workers", ()))

        def kill() -> None:
            for process in processes:
                process.kill()

        # torch waits 5 s for each worker in turn; one stuck in the user's data set gets less
        killer = threading.Timer(STOP_GRACE_S, kill)
        killer.daemon = True
        try:
            killer.start()
        except RuntimeError:  # the interpreter is ending: no more threads, and torch's own bound holds
            log.debug("stopping loader workers without a bound of our own")
        try:
            shut_down()
        except RuntimeError as error:  # torch's SIGCHLD handler names the worker just killed
            log.warning("a loader worker did not stop by itself: %s", error)
            for process in processes:
                process.kill()
                process.join(STOP_GRACE_S)
        finally:
            killer.cancel()


class _Requests(Sampler[Request]):
    """The sampler without end. torch pulls from it whenever a worker may load one more batch."""

    def __init__(self, plan: Plan) -> None:
        # weakly: a plan may own its prefetcher, and the pair must still be collected without an exit
        self._plan = weakref.proxy(plan)
        self.serial = 1
        self.next_key: BatchKey | None = None
        self.under_way: deque[tuple[int, BatchKey | None]] = deque()

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        key = self.next_key
        if key is None:  # workers start before the first plan is known, or nothing can be predicted
            return self._placeholder()
        try:
            request = Request(self.serial, key.epoch, self._plan.indices_of(key))
        except Exception as error:
            if not self._has_wanted():  # of the batch asked for
                raise
            # Of a batch that may never be asked for, such as one behind the job's last epoch.
            log.debug("%s can't be read ahead: %s", key, error)
            self.next_key = None
            return self._placeholder()
        self.under_way.append((self.serial, key))
        try:
            self.next_key = self._plan.following(key)
        except Exception as error:  # noqa: BLE001 - the batch behind raises it, if it is asked for
            log.debug("what follows %s is not known: %s", key, error)
            self.next_key = None
        return request

    def _placeholder(self) -> Request:
        self.under_way.append((0, None))
        return Request(0, 0, [])

    def _has_wanted(self) -> bool:
        return any(serial == self.serial for serial, _ in self.under_way)

    def leads_to(self, key: BatchKey) -> bool:
        """Tells whether `key` is the first batch still wanted of those under way, or else the next request."""
        for serial, requested in self.under_way:
            if serial == self.serial:
                return requested == key
        return self.next_key == key

    def restart_from(self, key: BatchKey | None) -> None:
        self.serial += 1
        self.next_key = key


class Prefetcher:
    """Loads micro-batches by key, ahead of their use. Not thread-safe."""

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        sample_seed: int | None,
        process_seed: int = 0,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
    ) -> None:
        """Creates the torch DataLoader, but starts no process yet.

        plan: only a weak reference is kept. sample_seed: None leaves random numbers that are drawn while a batch is
        read to the process that reads it. process_seed: of the worker processes' own random numbers.
        """
        if num_workers > 0 and multiprocessing_context is None:
            multiprocessing_context = "fork"  # scripts without a __main__ guard work
        self._requests = _Requests(plan)
        oldest_wanted = None
        if num_workers > 0:
            oldest_wanted = torch.ones((), dtype=torch.int64, device="cpu")
            oldest_wanted.share_memory_()  # type: ignore[no-untyped-call]
        self._worker_start = _WorkerStart(worker_init_fn)
        self._reader = BatchReader(dataset, collate_fn, sample_seed, oldest_wanted)
        self._loader: DataLoader[Any] = DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=_as_is,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=self._worker_start,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            # its own, or starting workers would draw from the script's random numbers
            generator=torch.Generator().manual_seed(process_seed),
        )
        # what torch's iterator adds to a batch that this process reads can cost more than reading it
        self._reads_here = num_workers == 0 and not pin_memory
        self._running = _Running(oldest_wanted)
        self._finalizer = weakref.finalize(self, self._running.stop)

    def start(self) -> None:
        """Starts the worker processes, if they are not there. They wait for the first `take`."""
        if self._running.iterator is not None:
            return
        self._requests.under_way.clear()
        if self._reads_here:
            self._running.iterator = map(self._reader.__getitem__, self._requests)
            return
        if self._running.oldest_wanted is not None:
            self._running.oldest_wanted.fill_(self._requests.serial)
        self._running.process_id = os.getpid()
        collecting = gc.isenabled()
        self._worker_start.collect_garbage = collecting
        gc.disable()  # a child is born without collection, until _WorkerStart has frozen what it inherited
        try:
            # The iterator draws a seed from a generator of the CPU, and CUDA cannot start in a forked child. What this
            # process reads itself still goes to the script's default device.
            with warnings.catch_warnings(), torch.device("cpu"):
                # Python 3.12 warns of forks beside threads; see _WorkerStart for what is done about it
                warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
                self._running.iterator = iter(self._loader)
        finally:
            if collecting:
                gc.enable()

    def take(self, key: BatchKey) -> Any:
        """Returns the batch of `key`. Raises what loading it raised, with the worker's traceback."""
        self.start()
        requests = self._requests
        if not requests.leads_to(key):
            self._restart_from(key)
        iterator = self._running.iterator
        assert iterator is not None
        while True:
            try:
                with tracing.span("load"):
                    data = self._next(iterator)
            except BaseException:
                # a worker died or the wait was interrupted: what is under way is no longer known
                self.close()
                raise
            serial, _ = requests.under_way.popleft()
            if serial == requests.serial:
                break
            if isinstance(data, LoadFailure):
                log.debug("a batch that is no longer wanted failed to load: %s", data.error.exc_msg)
        if isinstance(data, LoadFailure):
            data.error.reraise()  # type: ignore[no-untyped-call]
        return data

    def forget(self) -> None:
        """Drops what was loaded ahead: the plan has other indices for its keys now."""
        self._restart_from(None)

    def _restart_from(self, key: BatchKey | None) -> None:
        self._requests.restart_from(key)
        if self._running.oldest_wanted is not None:
            self._running.oldest_wanted.fill_(self._requests.serial)

    def _next(self, iterator: Iterator[Any]) -> Any:
        try:
            return next(iterator)
        except (OSError, EOFError) as error:
            # A batch's memory is fetched from the worker that made it; if that has died, say so
            processes = getattr(iterator, "_workers", ())
            if processes and wait([p.sentinel for p in processes], timeout=_DEATH_SEEN_WITHIN_S):
                ended = ", ".join(f"pid {p.pid}: {p.exitcode}" for p in processes if not p.is_alive())
                raise RuntimeError(f"a DataLoader worker ended by itself (exit codes: {ended})") from error
            raise

    @property
    def worker_process_ids(self) -> list[int]:
        return [process.pid for process in getattr(self._running.iterator, "_workers", ())]

    def close(self) -> None:
        """Stops the worker processes, within a few seconds. A later `take` starts new ones."""
        self._running.stop()
        self._requests.under_way.clear()
        self._requests.next_key = None
