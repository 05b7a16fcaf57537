"""Measures what a cached data set saves in the second epoch, and how close it comes to tensors in plain memory.

    python -m benchmarks.cached_dataset                              # about 2 minutes
    python -m benchmarks.cached_dataset --keep
    python -m benchmarks.cached_dataset --samples 64 --rounds 1      # seconds: does it run?

torch's DataLoader, batches of 32, shuffled, with and without processes of its own (persistent, warmed up).
The first epoch computes every sample and fills the cache; "nothing kept" computes them without one. Then come rounds of
whole epochs in turn: tensors in a list, the embedded backend, Redis in a server of this host. Medians of the rounds;
ratios are of throughputs in the same run.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

import bagua_core as bagua
from benchmarks import result_file
from benchmarks.cached_dataset_samples import KINDS, InMemory

BATCH = 32
AIM_SECOND, AIM_MEMORY = 10.0, 0.8


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of whole epochs. rounds_s: by system, one for each round."""

    kind: str
    num_workers: int
    samples: int
    nothing_kept_s: float
    first_s: dict[str, float]
    rounds_s: dict[str, list[float]]
    hit_rate: dict[str, float]

    def per_s(self, system: str) -> float:
        return self.samples / statistics.median(self.rounds_s[system])

    def saves(self, system: str) -> float:
        """How many times as fast as the first epoch, which filled it, the later ones are."""
        return self.first_s[system] * self.per_s(system) / self.samples

    def of_memory(self, system: str) -> float:
        return self.per_s(system) / self.per_s("memory")

    def cells(self, system: str) -> list[str]:
        return [
            self.kind,
            str(self.num_workers),
            system,
            f"{self.samples / self.nothing_kept_s:.0f}",
            f"{self.samples / self.first_s[system]:.0f}",
            f"{self.per_s(system):.0f}",
            f"{self.saves(system):.1f}",
            f"{self.per_s('memory'):.0f}",
            f"{self.of_memory(system):.2f}",
        ]


HEAD = [
    "samples of", "processes", "backend", "nothing kept, /s", "first epoch, /s", "later epochs, /s", "later : first",
    "in memory, /s", "later : in memory",
]  # fmt: skip


def loader(dataset: Any, num_workers: int, seed: int) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        generator=torch.Generator().manual_seed(seed),
    )


def epoch_s(batches: DataLoader[Any], samples: int) -> float:
    """One epoch; the loader's processes are there before the clock starts, but for the first epoch of all."""
    start = time.perf_counter()
    seen = sum(len(labels) for _, labels in batches)
    took_s = time.perf_counter() - start
    assert seen == samples
    return took_s


def measure(kind: str, num_workers: int, samples: int, rounds: int, backends: Sequence[str]) -> Row:
    plain = KINDS[kind](samples)
    kept: dict[str, Any] = {
        backend: bagua.CachedDataset(plain, backend, f"benchmark {kind} {num_workers}")
        for backend in backends
    }
    loaders = {backend: loader(dataset, num_workers, 1) for backend, dataset in kept.items()}
    first_s = {backend: epoch_s(batches, samples) for backend, batches in loaders.items()}
    nothing_kept_s = epoch_s(loader(plain, num_workers, 2), samples)
    loaders["memory"] = loader(InMemory([plain[i] for i in range(samples)]), num_workers, 3)
    for batches in loaders.values():
        epoch_s(batches, samples)
    rounds_s: dict[str, list[float]] = {system: [] for system in loaders}
    before = {backend: dataset.stats() for backend, dataset in kept.items()}
    for _ in range(rounds):
        for system, batches in loaders.items():
            rounds_s[system].append(epoch_s(batches, samples))
    rates = {}
    for backend, dataset in kept.items():
        stats = dataset.stats()
        hits, misses = stats.hits - before[backend].hits, stats.misses - before[backend].misses
        rates[backend] = hits / (hits + misses)
    loaders.clear()
    for dataset in kept.values():
        dataset.close()
    return Row(kind, num_workers, samples, nothing_kept_s, first_s, rounds_s, rates)


def verdict(rows: Sequence[Row]) -> tuple[str, bool]:
    """Of the embedded backend in a loader with processes, as training uses it."""
    judged = [row for row in rows if row.num_workers > 0] or list(rows)
    saves = min(row.saves("embedded") for row in judged)
    ratio = min(row.of_memory("embedded") for row in judged)
    reached = saves >= AIM_SECOND and ratio >= AIM_MEMORY
    return (
        f"Embedded, in loaders with processes: later epochs at least {saves:.1f} times as fast as the first (aim "
        f"{AIM_SECOND:g}), and {ratio:.2f} of memory's throughput (aim {AIM_MEMORY:g}).",
        reached,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kind", action="append", choices=list(KINDS), help="default: all")
    parser.add_argument("--num-workers", type=int, action="append", help="default: 0 and 2")
    parser.add_argument("--backend", action="append", choices=["embedded", "redis"], help="default: both")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/cached_dataset-<date>")
    options = parser.parse_args(arguments)
    about = result_file.circumstances()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    backends = options.backend or ["embedded", "redis"]
    remark = ""
    if "redis" in backends and shutil.which("redis-server") is None:
        backends.remove("redis")
        remark = "\n\nNo Redis here: redis-server is not installed."
    rows = [
        measure(kind, num_workers, options.samples, options.rounds, backends)
        for kind in options.kind or KINDS
        for num_workers in options.num_workers or (0, 2)
    ]
    words = result_file.table(HEAD, [row.cells(backend) for row in rows for backend in backends])
    reached = True
    if "embedded" in backends:
        said, reached = verdict(rows)
        words += f"\n\n{said}"
    words += remark
    print(f"{result_file.in_words(about)}\n\n{words}")
    if options.keep:
        for path in result_file.keep("cached_dataset", about, words, [asdict(row) for row in rows]):
            print(path.relative_to(result_file.ROOT))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
