"""Compares what each algorithm has learned with DDP, from the same samples: final losses on three tasks, several seeds.

    python -m benchmarks.fidelity --keep                                             # about 9 minutes
    python -m benchmarks.fidelity --task digits --algorithm bytegrad --seeds 1       # under half a minute

Four workers on this host. Handwritten digits (needs scikit-learn: the extra `bench`), characters and words of the
standard library's sources; every system gets the same initial weights and the same samples in the same order.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import fidelity_plots, fidelity_table, result_file
from benchmarks.algorithm_choices import CHOICES, HOOKED
from benchmarks.fidelity_runs import WORKERS, Trained, TrainingFailed, baseline_of, train
from benchmarks.fidelity_tasks import QADAM_WARM_UP, TASKS, Task, save_pieces

SEEDS = 3


def systems_for(task: Task, algorithms: Sequence[str]) -> list[str]:
    """The baselines that the algorithms are compared with, and then they; PowerSGD has torch's own run before it."""
    chosen = [name for name in CHOICES if not algorithms or name in algorithms]
    baselines = dict.fromkeys(baseline_of(name, task) for name in chosen)
    return [*baselines, *([HOOKED] if "power_sgd" in chosen else []), *chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--task", choices=sorted(TASKS), action="append", default=[])
    parser.add_argument("--algorithm", choices=sorted(CHOICES), action="append", default=[])
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many; default %(default)s")
    parser.add_argument("--epochs", type=int, help="instead of the task's")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    about = result_file.circumstances()
    began_s = time.monotonic()
    trained: list[Trained] = []
    failures: list[str] = []
    directory = Path(tempfile.mkdtemp(prefix="bagua-fidelity-"))
    try:
        for task in [
            task for name, task in TASKS.items() if (name in args.task if args.task else task.is_usual)
        ]:
            data = directory / f"{task.name}.pt"
            save_pieces(task.pieces(), data)
            for system in systems_for(task, args.algorithm):
                job_began_s = time.monotonic()
                out = directory / f"{task.name}-{system}"
                try:
                    found = train(task, system, range(args.seeds), args.epochs or task.epochs, data, out)
                except TrainingFailed as error:
                    failures.append(f"{task.name}, {system}: {str(error).splitlines()[0]}")
                    print(f"{task.name}, {system}: {error}", file=sys.stderr, flush=True)
                    continue
                trained += found
                losses = ", ".join(f"{t.train_loss:.4f}/{t.held_out_loss:.4f}" for t in found)
                took_s = time.monotonic() - job_began_s
                print(f"{task.name}, {system}: {losses} ({took_s:.0f} s)", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not trained:
        print("\n".join(["no training succeeded", *failures]), file=sys.stderr)
        return 1
    rows = fidelity_table.rows(trained)
    notes = [f"- failed: {failure}" for failure in failures]
    words = "\n".join(
        [_about(args.seeds, time.monotonic() - began_s), "", fidelity_table.in_words(rows), *notes]
    )
    print(words)
    if args.keep:
        values = {
            "rows": [asdict(r) for r in rows],
            "trained": [asdict(t) for t in trained],
            "failed": failures,
        }
        usual = [name for name, task in TASKS.items() if task.is_usual]
        part = result_file.part_of(args.task, usual) + result_file.part_of(args.algorithm, CHOICES)
        figures = fidelity_plots.figures(rows, trained)
        for path in result_file.keep("fidelity", about, words, values, part, figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 1 if failures else 0


def _about(seeds: int, took_s: float) -> str:
    return (
        f"{WORKERS} workers on one host, {seeds} seeds, {took_s / 60:.1f} minutes in all. A seed sets initial weights, "
        "order of samples and dropout, alike for all systems; ratios are taken seed by seed, against torch's DDP with "
        "the same optimizer; shown: the mean (least to most). Losses are those of the model that comes out (the "
        "average of the replicas where they differ) over the whole set. QAdam warms up over the first "
        f"{QADAM_WARM_UP:.0%} of the steps; qadam_uncompressed is its optimizer with whole gradients. Within 2 %: both "
        "losses, in the mean, are at most so much above DDP's. Bytes are those that a worker sends over TCP in a step, "
        "by the kernel's count, the mean from the first step to the last; x fewer: than DDP."
    )


if __name__ == "__main__":
    sys.exit(main())
