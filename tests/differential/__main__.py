"""Command line of the differential harness: runs seeds and prints a line for each.

python -m tests.differential --seeds 0:100
python -m tests.differential --seeds short                  # as few as show every feature with every kind of event
python -m tests.differential --seeds 7 --feature nadam --feature schedule=epoch --history none --verbose
python -m tests.differential --seeds 7 --only --history "3 workers; kill w1 commit.after@5; join w3 step@7"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from tests.differential import features, history, short_form
from tests.differential.lanes import Case, verdicts


def main() -> int:
    arguments = _parsed()
    began_s = time.monotonic()
    failed, failed_seeds, count = Counter[str](), 0, 0
    durations_s: list[float] = []
    for verdict in verdicts((_case(seed, arguments) for seed in arguments.seeds), arguments.jobs):
        count += 1
        durations_s.append(verdict.duration_s)
        if arguments.json:
            print(verdict.encode().decode(), flush=True)
            continue  # its reader judges; the exit code says only that all seeds ran
        print(verdict.line, flush=True)
        if verdict.problems:
            failed_seeds += 1
            failed.update(verdict.features)
        if arguments.verbose:
            print("\n".join(verdict.problems))
            print(verdict.logs)
    if not arguments.json:
        lasted_s = time.monotonic() - began_s
        each_s, longest_s = sum(durations_s) / max(1, count), max(durations_s, default=0.0)
        each = f"{each_s:.2f} s a seed, at most {longest_s:.1f} s"
        print(f"{count} seeds, {failed_seeds} failed; {lasted_s:.1f} s, {each}")
        if failed:
            print(
                "features of those that failed: " + ", ".join(f"{n} {c}" for n, c in failed.most_common(12))
            )
    return 1 if failed_seeds else 0


def _case(seed: int, arguments: argparse.Namespace) -> Case:
    f = features.Features(seed) if arguments.only else features.draw(seed)
    f = features.parse(f, arguments.feature)
    if arguments.history is None:
        happened = history.draw(seed, f)
    else:
        happened = history.History(2) if arguments.history == "none" else history.parse(arguments.history)
    return Case(f, happened)


def _seeds(text: str) -> Sequence[int]:
    if text == "short":
        return short_form.seeds()
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.differential", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--seeds", type=_seeds, required=True, help="A:B (B excluded), one seed, or `short`")
    parser.add_argument(
        "--feature", action="append", default=[], help="set a feature: field=choice, or an optimizer"
    )
    parser.add_argument(
        "--only", action="store_true", help="draw no features: those of --feature and no others"
    )
    parser.add_argument(
        "--history", help='"none" (two workers), or a history as it is printed; default: drawn'
    )
    parser.add_argument("--jobs", type=int, default=2, help="seeds at the same time (default: %(default)s)")
    parser.add_argument(
        "--verbose", action="store_true", help="print all differences, and the logs of failed seeds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each seed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
