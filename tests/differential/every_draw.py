"""A worker is lost in a draw of a script that adds gradients up over several.

`python -m tests.differential.every_draw [all]` prints a verdict for each loss: in draws that differ, or in every one.
"""

from __future__ import annotations

import sys

from tests.differential import history
from tests.differential.features import Features, parse
from tests.differential.lanes import Case, verdicts

SEED = 1
POINTS = ("reduction.before", "commit.before", "commit.after")
# Three draws make a step of the optimizer and four an epoch: each place in a step, and in the middle of a step the last
# draw of an epoch and the first of the next. The others repeat the place of one of these.
DIFFERENT_DRAWS = (3, 4, 5, 8, 9)


def cases(every: bool) -> list[Case]:
    f = parse(Features(SEED), ["accumulation=3", "momentum"])
    assert (f.batches, f.accumulation) == (4, 3)
    draws = range(2, f.steps) if every else DIFFERENT_DRAWS
    return [
        Case(f, history.parse(f"3 workers; kill w1 {point}@{draw}")) for draw in draws for point in POINTS
    ]


def main() -> None:
    for verdict in verdicts(cases("all" in sys.argv[1:]), at_once=2):
        print(verdict.encode().decode(), flush=True)


if __name__ == "__main__":
    main()
