"""How are the complexities of many samples computed, and by whom? Block by block: here, in processes or in threads.

With a directory, blocks that somebody has computed are read from there instead: the workers of a node begin at
different blocks and so share the work. A block is checked when it is read, in form and in one of its samples.
Each sample is read under a random seed of its own, so that what it costs does not depend on who reads it.
"""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bagua_core.data.partition import mixed_seed
from bagua_core.data.sample_seeding import has_no_randomness, load_seeded_samples, random_sources_kept

BLOCK = 1024
_WORTH_PROCESSES_S = 1.0  # what starting processes must save
_MOST_PROCESSES = 8
_MAGIC = b"bagua complexities 1\n"


class StaleComplexities(ValueError):
    """A sample's complexity is not what was kept for it."""


class Measure:
    """complexity_fn of samples, checked. Works in any process and thread."""

    def __init__(self, dataset: Any, complexity_fn: Callable[[Any], float], seed: int) -> None:
        self._dataset = dataset
        self._complexity_fn = complexity_fn
        self._seed = None if has_no_randomness(dataset) else seed

    def __call__(self, indices: Sequence[int]) -> list[float]:
        """Raises ValueError, naming the sample, for anything but a finite number of at least 0."""
        if self._seed is None:
            return [self._checked(index, self._dataset[index]) for index in indices]
        with random_sources_kept():
            return [
                self._checked(i, load_seeded_samples(self._dataset, self._seed, 0, [i])[0]) for i in indices
            ]

    def unseeded(self, indices: Sequence[int]) -> list[float]:
        """In a thread: the sources of random numbers are everybody's."""
        return [self._checked(index, self._dataset[index]) for index in indices]

    def _checked(self, index: int, sample: Any) -> float:
        return checked(self._complexity_fn(sample), index)


def checked(value: Any, index: int) -> float:
    try:
        complexity = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the complexity of sample {index} is {value!r}, which is not a number") from error
    if not math.isfinite(complexity) or complexity < 0:
        raise ValueError(
            f"the complexity of sample {index} is {complexity}; it must be finite and at least 0"
        )
    return complexity


def _block_range(block: int, length: int) -> range:
    return range(block * BLOCK, min((block + 1) * BLOCK, length))


class KeptBlocks:
    """Blocks in a directory. A block appears whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def _path(self, block: int) -> Path:
        return self._directory / f"{block:08d}.complexities"

    def read(
        self, block: int, indices: range, measure: Callable[[Sequence[int]], list[float]]
    ) -> list[float] | None:
        """None if there is none, or a torn one. Raises StaleComplexities."""
        try:
            data = self._path(block).read_bytes()
        except FileNotFoundError:
            return None
        head = len(_MAGIC) + 4
        values = np.frombuffer(data[head:], dtype="<f8") if len(data) == head + 8 * len(indices) else None
        crc = zlib.crc32(data[head:]).to_bytes(4, "little")
        if values is None or data[:head] != _MAGIC + crc:
            return None
        kept: list[float] = values.tolist()
        # another one in every block, the same on every machine
        place = mixed_seed(block, len(indices)) % len(indices)
        (now,) = measure([indices[place]])
        if now != kept[place]:
            raise StaleComplexities(
                f"the complexity of sample {indices[place]} is {now:g}, but {kept[place]:g} was kept in "
                f"{self._directory}: the data or what complexity_fn uses have changed. Delete that directory, or give "
                "another cache_key"
            )
        return kept

    def write(self, block: int, values: Sequence[float]) -> None:
        data = np.asarray(values, dtype="<f8").tobytes()
        part = self._path(block).with_suffix(f".{os.uname().nodename}.{os.getpid()}.part")
        part.write_bytes(_MAGIC + zlib.crc32(data).to_bytes(4, "little") + data)
        part.replace(self._path(block))


class BlockReader(Dataset[tuple[int, list[float]]]):
    """What one process or thread does for a block."""

    def __init__(
        self, length: int, measure: Callable[[Sequence[int]], list[float]], kept: KeptBlocks | None
    ) -> None:
        self._length = length
        self._measure = measure
        self._kept = kept

    def __getitem__(self, block: int) -> tuple[int, list[float]]:
        indices = _block_range(block, self._length)
        values = self._kept.read(block, indices, self._measure) if self._kept else None
        if values is None:
            values = self._measure(indices)
            if self._kept:
                self._kept.write(block, values)
        return block, values


def all_complexities(
    measure: Measure, length: int, *, workers: int | None, threads: bool, kept: KeptBlocks | None
) -> np.ndarray[Any, Any]:
    """[length], float64. workers: processes or threads; 0 none; None as many as pay.

    Raises ValueError (a complexity is no number), StaleComplexities, and what reading a sample raises.
    """
    found = np.empty(length, dtype=np.float64)
    count = -(-length // BLOCK)
    first = os.getpid() % count if kept and count else 0  # neighbours begin at other blocks
    blocks = [(first + number) % count for number in range(count)]

    def take(results: Iterable[tuple[int, list[float]]]) -> Iterator[int]:
        for block, values in results:
            indices = _block_range(block, length)
            found[indices.start : indices.stop] = values
            yield block

    here = BlockReader(length, measure, kept)
    if workers is None:
        began_s = time.monotonic()
        for done, _ in enumerate(take(map(here.__getitem__, blocks)), start=1):
            each_s = (time.monotonic() - began_s) / done
            if each_s * (count - done) > _WORTH_PROCESSES_S:
                blocks = blocks[done:]
                break
        else:
            return found
        workers = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
        workers = 0 if workers == 1 else workers
    if workers == 0:
        results: Iterable[tuple[int, list[float]]] = map(here.__getitem__, blocks)
    elif threads:
        reader = BlockReader(length, measure.unseeded, kept)
        with ThreadPoolExecutor(workers, "complexities") as pool:
            for _ in take(pool.map(reader.__getitem__, blocks)):
                pass
        return found
    else:
        results = _in_processes(here, blocks, min(workers, max(1, len(blocks))))
    for _ in take(results):
        pass
    return found


def _in_processes(reader: BlockReader, blocks: list[int], workers: int) -> Iterator[tuple[int, list[float]]]:
    """Ends its processes with it."""
    loader = DataLoader(
        reader,
        batch_size=None,
        sampler=blocks,
        num_workers=workers,
        collate_fn=_as_is,
        multiprocessing_context="fork",  # scripts need no __main__ guard, and data sets need not be picklable
        worker_init_fn=_begin_in_child,
        generator=torch.Generator(),  # its own, or it would draw from the script's random numbers
    )
    collecting = gc.isenabled()
    gc.disable()  # see _begin_in_child
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forks beside threads; see _begin_in_child for what is done about it
            warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
            iterator = iter(loader)
    finally:
        if collecting:
            gc.enable()
    try:
        yield from iterator
    finally:
        # now: as garbage of an error's traceback it would take torch five seconds for each process
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def _as_is(value: Any) -> Any:
    return value


def _begin_in_child(worker_number: int) -> None:
    gc.freeze()  # a child must never finalize the parent's gRPC or Gloo objects, whose threads it lacks
