"""Measures how long each example takes, started from nothing as its first lines for bagua-launch say.

    python -m benchmarks.examples --keep
    python -m benchmarks.examples --only digits.py --only char_lm.py

The cells of the notebook run one after another in a Python of their own, as in a kernel. `slow_links.py` has a row for
each of its lines, which name an algorithm. The exit code is 1 if an example fails or takes longer than a minute. Needs
the packages of the examples (scripts/test --long has them) and an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from benchmarks import result_file
from tests.docs.test_examples import EXAMPLES, EXIT_OF_SIGTERM, code_cells, scripts, started_by
from tests.lab.launched import environment

LIMIT_S = 60.0
HANG_S = 300.0
CELLS = "cells.py"
# its first run is preempted, and the second one goes on: both together are the example
RESUMES = "spot_nodes.py"
# its lines name an algorithm each
OF_ALGORITHMS = "slow_links.py"


class Example(NamedTuple):
    """lines: its runs, one after another."""

    name: str
    path: Path
    lines: list[list[str]]


class Taken(TypedDict):
    example: str
    command: str  # of its last run
    seconds: float
    as_expected: bool


def measured() -> list[Example]:
    """The scripts and the notebook."""
    found = []
    for path in sorted([*scripts(), *EXAMPLES.rglob("*.ipynb")]):
        name = str(path.relative_to(EXAMPLES))
        if path.suffix == ".ipynb":
            found.append(Example(name, path, [["python", CELLS]]))
            continue
        first, *others = started_by(path)
        found.append(Example(name, path, [first, *(others[:1] if path.name == RESUMES else [])]))
        if path.name == OF_ALGORITHMS:
            found += [Example(" ".join([name, *words[-2:]]), path, [words]) for words in others]
    return found


def measure(example: Example) -> Taken:
    path, lines = example.path, example.lines
    is_notebook = path.suffix == ".ipynb"
    program = [] if is_notebook else ["-m", "bagua_launch"]
    codes = [*[EXIT_OF_SIGTERM] * (len(lines) - 1), 0]
    as_expected = True
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "examples").symlink_to(EXAMPLES)
        if is_notebook:
            (Path(directory) / CELLS).write_text("\n".join(code_cells(path)))
        began_s = time.monotonic()
        for (_, *words), expected in zip(lines, codes, strict=True):
            words = [word.replace("/tmp/spot", f"{directory}/spot") for word in words]
            done = subprocess.run(
                [sys.executable, *program, *words],
                cwd=directory, env=environment(), capture_output=True, text=True, timeout=HANG_S, check=False,
            )  # fmt: skip
            if done.returncode != expected:
                print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
                as_expected = False
        seconds = time.monotonic() - began_s
    return Taken(example=example.name, command=" ".join(lines[-1]), seconds=seconds, as_expected=as_expected)


def verdict(taken: Taken) -> str:
    if not taken["as_expected"]:
        return "failed"
    return "yes" if taken["seconds"] <= LIMIT_S else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    all_of_them = measured()
    known = {example.path.name: example for example in all_of_them}
    parser.add_argument(
        "--only", choices=sorted(known), action="append", default=[], help="measure this example"
    )
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    args = parser.parse_args(arguments)
    about = result_file.circumstances()
    found = []
    for example in all_of_them:
        if args.only and example.path.name not in args.only:
            continue
        found.append(measure(example))
        print(
            f"{found[-1]['seconds']:6.1f} s  {found[-1]['example']}: {verdict(found[-1])}",
            file=sys.stderr,
            flush=True,
        )
    rows = [[f"`{t['example']}`", f"{t['seconds']:.1f} s", verdict(t), f"`{t['command']}`"] for t in found]
    table = result_file.table(["example", "time", f"within {LIMIT_S:g} s", "command"], rows)
    words = (
        "From the command to its end, with a start of Python and the import of torch. "
        f"`{RESUMES}`: its preempted run and the one that goes on, together. `{CELLS}`: the cells of the notebook, one "
        f"after another, without Jupyter.\n\n{table}"
    )
    print(words)
    if args.keep:
        part = [Path(name).stem for name in result_file.part_of(args.only, known)]
        print("\n" + "\n".join(map(str, result_file.keep("examples", about, words, found, part))))
    return int(any(verdict(taken) != "yes" for taken in found))


if __name__ == "__main__":
    sys.exit(main())
