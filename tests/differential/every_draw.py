"""A worker is lost in every draw of a script that adds gradients up over several.

`python -m tests.differential.every_draw` prints a verdict for each.
"""

from __future__ import annotations

from tests.differential import history
from tests.differential.features import Features, parse
from tests.differential.lanes import Case, verdicts

SEED = 1
POINTS = ("reduction.before", "commit.before", "commit.after")


def cases() -> list[Case]:
    f = parse(Features(SEED), ["accumulation=3", "momentum"])
    draws = range(2, f.steps)
    return [
        Case(f, history.parse(f"3 workers; kill w1 {point}@{draw}")) for draw in draws for point in POINTS
    ]


def main() -> None:
    for verdict in verdicts(cases(), at_once=2):
        print(verdict.encode().decode(), flush=True)


if __name__ == "__main__":
    main()
