"""Predicts steps and lives of jobs on 8 to 1,024 nodes by simulation, beside DDP, torchft and torchrun.

    python -m benchmarks.scaling --keep            # the study: about 2 minutes
    python -m benchmarks.scaling --quick           # a small part of it, seconds
    python -m benchmarks.scaling --calibrate --keep        # lab hosts, 7 minutes of an otherwise idle machine; root
    python -m benchmarks.scaling --calibrate-kept          # from a kept result of benchmarks.tradeoff, 20 s
    python -m benchmarks.scaling --calibrate-kept lab      # from the kept result of --calibrate, 20 s

The study uses no cluster. docs/scaling.md has assumptions, limits and plots. A seed repeats every number.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from benchmarks import result_file
from benchmarks.scaling import end_to_end, plots, presets, published, report, study
from benchmarks.scaling.lab.calibrate import calibrate
from benchmarks.scaling.lab.observations import ALGORITHMS, KEPT

_STRAGGLER = 1.5


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=raw
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="two models, two sizes, few failures")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure steps on lab hosts, fit, and compare"
    )
    parser.add_argument(
        "--calibrate-kept",
        nargs="?",
        const="tradeoff",
        default="",
        choices=KEPT,
        help="the same with the steps of a kept result: of tradeoff (the default), or of the lab",
    )
    parser.add_argument(
        "--tiny", action="store_true", help="with --calibrate: two hosts and few steps, as a test"
    )
    parser.add_argument(
        "--algorithm", choices=ALGORITHMS, action="append", default=[], help="with --calibrate"
    )
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    about = result_file.circumstances()
    if args.calibrate or args.calibrate_kept:
        return calibrate(args.calibrate_kept, args.tiny, args.algorithm, args.keep, about)
    return _study(args.seed, args.quick, args.keep, about)


def _study(seed: int, quick: bool, keep: bool, about: dict[str, object]) -> int:
    began_s = time.monotonic()
    vgg16, bert = presets.vgg16(), presets.bert_large()
    link = presets.LINKS[1]
    if quick:
        points = study.sweep((vgg16, bert), (link,), (8, 128), seed)
        known = study.step_times(points)
        lives = study.lives((vgg16, bert), (link,), (8, 64), seed=seed, failures=10, known=known)
        costs = study.membership_costs((vgg16, bert), (link,), seed=seed, known=known)
    else:
        points = study.sweep(seed=seed)
        known = study.step_times(points)
        lives = study.lives(seed=seed, known=known)
        costs = study.membership_costs(seed=seed, known=known)
    found = published.points(seed)
    whole = end_to_end.gains(seed)
    slow = study.stragglers(vgg16, link, 64, _STRAGGLER, seed)
    votes = study.vote_of_leaders(vgg16, link, 1024, seed)
    words = report.in_words(points, lives, costs, found, published.tcp_rates(seed), whole, slow, votes)
    print(words)
    print(f"took {time.monotonic() - began_s:.0f} s", file=sys.stderr)
    if keep:
        values = report.values(points, lives, found, whole)
        figures = plots.figures(points, lives, found, whole)
        for path in result_file.keep("scaling", about, words, values, figures=figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
