"""Measures how long each example takes, started as its first line for bagua-launch says.

    python -m tests.docs.example_times [NAME ...]

Prints seconds and the exit code of each. Needs the packages of the examples (scripts/test --long has them) and an
otherwise idle machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.docs.test_examples import ROOT, scripts, started_by
from tests.lab.launched import launch

LIMIT_S = 300.0
SEVERAL_RUNS = "spot_nodes.py"  # its first run ends on purpose; the default run of the suite has both


def main(names: list[str]) -> int:
    failed = 0
    for path in scripts():
        if path.name == SEVERAL_RUNS or (names and path.name not in names):
            continue
        words = started_by(path)[0][1:]
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            (place / "examples").symlink_to(ROOT / "examples")
            began_s = time.monotonic()
            done = launch(*words, limit_s=LIMIT_S, directory=place)
        failed += done.returncode != 0
        print(f"{time.monotonic() - began_s:6.1f} s  exit {done.returncode}  {' '.join(words)}", flush=True)
        if done.returncode:
            print(done.said[-2000:], file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
