"""Measures load balancing for samples that differ in length: imbalance per step, and words a second of real jobs.

    python -m benchmarks.load_balancing --keep
    python -m benchmarks.load_balancing --part imbalance

Imbalance is the largest of the workers' work in a step over their mean: what a step takes longer than it must. Work is
words. Exit code 1 if a balanced split is above 1.05 in the mean where the plain one is 1.5 or more.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bagua_core.communication.step_interface import StepPlan
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from benchmarks import result_file
from benchmarks.load_balancing_texts import NAMES, texts
from tests.lab.process import LabProcess

UNBALANCED, GOOD = 1.5, 1.05
SIMILAR_BATCHES = 16
SYSTEMS = ("ddp", "ddp, balanced sampler", "elastic", "elastic, balanced", "elastic, similar")
_WORKER = "benchmarks.load_balancing_worker"
_TIMEOUT_S = 600.0


# -- imbalance: arithmetic


@dataclass(frozen=True, slots=True)
class Split:
    """One epoch. imbalances: by step. floor: what no split of these batches could be below, in the mean. slower: the
    epoch's time over that of perfect shares, where time is words."""

    texts: str
    workers: int
    name: str
    imbalances: list[float]
    floor: float
    slower: float

    def cells(self) -> list[str]:
        ordered = sorted(self.imbalances)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        mean = statistics.mean(ordered)
        numbers = [
            f"{mean:.3f}",
            f"{p95:.3f}",
            f"{ordered[-1]:.3f}",
            f"{self.floor:.3f}",
            f"{self.slower:.3f}",
        ]
        return [self.texts, str(self.workers), self.name, str(len(ordered)), *numbers]


def splits_of(name: str, lengths: list[int], workers: int, batch: int) -> list[Split]:
    largest_step = float(workers * max(lengths))
    balances = {
        "plain": None,
        "balanced": Balance(complexities=lengths),
        f"balanced, {SIMILAR_BATCHES} similar batches": Balance(
            complexities=lengths, similar_batches=SIMILAR_BATCHES
        ),
        f"budget {largest_step:.0f}, similar": Balance(
            complexities=lengths, budget=largest_step, similar_batches=4
        ),
    }
    found = []
    for title, balance in balances.items():
        size = len(lengths) if balance is not None and balance.budget else batch
        # the split is arithmetic: nothing is trained, so no engine is asked
        loader = ElasticDataLoader(lengths, size, balance=balance)
        imbalances, floors, slowest, total = [], [], 0.0, 0.0
        for number in range(len(loader)):
            position = {"epoch": 0, "batch": number}
            shares = [
                [lengths[i] for i in loader.samples_of(position, StepPlan(1, 0, rank, workers), rank)]
                for rank in range(workers)
            ]
            sums = [float(sum(share)) for share in shares]
            imbalances.append(max(sums) * workers / sum(sums))
            floors.append(max(1.0, max(max(share, default=0) for share in shares) * workers / sum(sums)))
            slowest += max(sums)
            total += sum(sums)
        found.append(
            Split(name, workers, title, imbalances, statistics.mean(floors), slowest * workers / total)
        )
    return found


def misses(splits: Sequence[Split]) -> list[str]:
    """Where the promise is broken: similar batches above GOOD although plain sampling is at least UNBALANCED."""
    plain = {(s.texts, s.workers): statistics.mean(s.imbalances) for s in splits if s.name == "plain"}
    return [
        f"{s.texts}, {s.workers} workers: {statistics.mean(s.imbalances):.3f}"
        for s in splits
        if "similar batches" in s.name
        and plain[s.texts, s.workers] >= UNBALANCED
        and statistics.mean(s.imbalances) > GOOD
    ]


# -- throughput: real processes


@dataclass(frozen=True, slots=True)
class Trial:
    texts: str
    workers: int
    device_us: float
    system: str
    words_per_s: float
    imbalance: float


def trial(
    path: Path, name: str, system: str, workers: int, device_us: float, steps: int, batch: int
) -> Trial:
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        words = ["-m", _WORKER, "--system", system, "--texts", str(path), "--out", str(out)]
        words += ["--steps", str(steps), "--batch", str(batch), "--device-us", str(device_us)]
        paths = [str(result_file.ROOT), str(result_file.ROOT / "protos"), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if system.startswith("ddp"):
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(workers)}
            commands = [([sys.executable, *words], {**env, "RANK": str(rank)}) for rank in range(workers)]
        else:
            launch = [sys.executable, "-m", "bagua_launch", "--nproc-per-node", str(workers)]
            commands = [([*launch, *words], env)]
        _run(commands, out)
        ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(workers)]
    sums = list(zip(*(r["words"] for r in ranks), strict=True))
    imbalance = statistics.mean(max(s) * workers / sum(s) for s in sums)
    seconds = statistics.mean(sum(r["seconds"]) for r in ranks)
    return Trial(name, workers, device_us, system, sum(map(sum, sums)) / seconds, imbalance)


def _run(commands: Sequence[tuple[list[str], dict[str, str]]], directory: Path) -> None:
    """directory: for what they print."""
    processes = [
        LabProcess([], words, env=env, output=directory / f"output-{number}.log", host_name="here")
        for number, (words, env) in enumerate(commands)
    ]
    try:
        for process in processes:
            if process.wait(_TIMEOUT_S) != 0:
                raise RuntimeError(f"{process} failed\n{process.tail()}")
    finally:
        for process in processes:
            process.kill()


def throughput(
    names: Sequence[str],
    worlds: Sequence[tuple[int, float]],
    systems: Sequence[str],
    *,
    count: int,
    steps: int,
    batch: int,
    repeat: int,
) -> list[Trial]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for name in names:
            path = Path(directory) / f"{name}.pt"
            save(texts(name, count), path)
            for workers, device_us in worlds:
                for _ in range(repeat):
                    found += [trial(path, name, s, workers, device_us, steps, batch) for s in systems]
    return found


def save(found: list[list[int]], path: Path) -> None:
    starts = [0]
    for text in found:
        starts.append(starts[-1] + len(text))
    torch.save(
        {"words": torch.tensor([word for text in found for word in text]), "starts": torch.tensor(starts)},
        path,
    )


def throughput_rows(trials: Sequence[Trial]) -> list[list[str]]:
    rows = []
    worlds = dict.fromkeys((t.texts, t.workers, t.device_us) for t in trials)
    for world in worlds:
        of_world = [t for t in trials if (t.texts, t.workers, t.device_us) == world]
        systems = list(dict.fromkeys(t.system for t in of_world))
        medians = {s: statistics.median(t.words_per_s for t in of_world if t.system == s) for s in systems}
        for system in systems:
            own = [t for t in of_world if t.system == system]
            rows.append(
                [
                    world[0],
                    f"{world[1]}" + (f", {world[2]:g} us of a device's work a word" if world[2] else ""),
                    system,
                    f"{statistics.median(t.imbalance for t in own):.3f}",
                    result_file.spread([t.words_per_s / 1000 for t in own], "k", 1),
                    f"{medians[system] / medians[systems[0]]:.2f}x",
                ]
            )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["imbalance", "throughput"], help="default: both")
    parser.add_argument("--texts", choices=NAMES, action="append", help="default: all")
    parser.add_argument("--count", type=int, default=8000, help="of texts")
    parser.add_argument("--batch", type=int, default=64, help="texts in a global batch of the real jobs")
    parser.add_argument("--steps", type=int, default=125, help="that count, of each job; 125 are one epoch")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="default: all")
    parser.add_argument("--workers", type=int, help="only a world of so many, with --device-us")
    parser.add_argument(
        "--device-us", type=float, default=0.0, help="stand for a device's work, for each word"
    )
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/load_balancing-<date>")
    options = parser.parse_args(arguments)
    about = result_file.circumstances()
    names = options.texts or list(NAMES)
    parts: list[str] = []
    values: dict[str, Any] = {}
    broken: list[str] = []
    if options.part != "throughput":
        splits = []
        for name in names:
            lengths = [len(text) for text in texts(name, options.count)]
            for workers, batch in ((2, 32), (4, 64), (8, 256)):
                splits += splits_of(name, lengths, workers, batch)
        broken = misses(splits)
        head = ["texts", "workers", "split", "steps", "mean", "95 %", "largest", "floor", "epoch's time"]
        parts += ["Imbalance, in one epoch:", "", result_file.table(head, [s.cells() for s in splits]), ""]
        values["splits"] = [asdict(s) for s in splits]
    if options.part != "imbalance":
        worlds = [(options.workers, options.device_us)] if options.workers else [(2, 0.0), (4, 40.0)]
        trials = throughput(
            names,
            worlds,
            options.system or SYSTEMS,
            count=options.count,
            steps=options.steps,
            batch=options.batch,
            repeat=options.repeat,
        )
        head = ["texts", "workers", "system", "imbalance", "thousand words a second", "of the first"]
        parts += [
            f"Real jobs, {options.steps} steps each:",
            "",
            result_file.table(head, throughput_rows(trials)),
            "",
        ]
        values["trials"] = [asdict(t) for t in trials]
    parts += [f"Broken promise: {text}" for text in broken]
    words = "\n".join(parts)
    print(f"{result_file.in_words(about)}\n\n{words}")
    if options.keep:
        part = [options.part] if options.part else []
        for path in result_file.keep("load_balancing", about, words, values, part):
            print(path.relative_to(result_file.ROOT))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
