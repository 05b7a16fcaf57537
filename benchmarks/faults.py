"""Measures the cost of each kind of fault: every row of the design's table, with torchft and torchrun beside it.

    python -m benchmarks.faults --repeat 5 --keep
    python -m benchmarks.faults --only bagua --repeat 1        # about 2 minutes
    python -m benchmarks.faults --only bagua --row worker_killed --row sigterm
    python -m benchmarks.faults --only bagua --row endings     # the faults that end a job or start it anew

Measured is the time from the fault to the survivors' next committed step; for etcd's the longest gap between two
steps meanwhile; for faults that end the job, the time to the end of its last command.
torchrun is measured once: it waits half a minute at each loss. Every wait has a deadline. Needs root (network
namespaces).
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import result_file
from benchmarks.fault_endings import ENDINGS, endings_trial
from benchmarks.fault_restart_mode import STOCK, StockTrial, stock_trial
from benchmarks.fault_rows import ROWS, Row, verdict
from benchmarks.fault_systems import SYSTEMS
from benchmarks.fault_trials import LEFT_OUT, PLANS, Trial, one_trial
from benchmarks.rivals.install_torchft import NotInstallable
from benchmarks.worker_environment import compile_packages
from tests.lab import namespaces
from tests.lab.namespaces import LabError

STOCK_ROW, ENDINGS_ROWS = "stock_ddp", "endings"
MOST_TORCHRUN_TRIALS = 1


def in_words(trials: Sequence[Trial], stock: Sequence[StockTrial], rows: Sequence[Row]) -> str:
    names = [name for name in SYSTEMS if any(t.system == name for t in trials)]
    columns = [(n, of_leader) for n in names for of_leader in ((False, True) if n == "bagua" else (False,))]
    lines = []
    for row in rows:
        found = {
            n: [m for t in trials if t.system == n for m in t.measured if m.row == row.name] for n in names
        }
        digits = 3 if row.step_gap else 2
        cells = [
            result_file.spread([m.value_s for m in found[n] if m.of_leader is of_leader], "s", digits)
            for n, of_leader in columns
        ]
        lines.append([row.title, row.promise, *cells, verdict(row, found.get("bagua", []))])
    heads = [f"{n}, leader's host" if of_leader else n for n, of_leader in columns]
    parts = [result_file.table(["fails", "promise", *heads, "Bagua's promise"], lines)] if lines else []
    parts += [
        "",
        "Median (least to most, number of trials) of the time from the fault to the survivors' next committed step; of "
        "etcd's: the longest gap between two steps meanwhile; of the minimum: from the command on the host that comes "
        "back, so its start is in it; of a fault that ends the job: to the end of its last command; of the lost state: "
        "to the first step from the checkpoint, with agents that live. "
        "Bagua's faults of a host strike one that does not lead, and the one that does.",
    ]
    if stock:
        parts += [
            "",
            "Restart mode: stock DDP script rescale (join, host killed), examples/stock_ddp.py:",
            "",
        ]
        parts.append(_stock_table(stock))
    said = Counter(f"- {t.system}: {note}" for t in trials for note in t.notes)
    said += Counter(f"- restart mode, {s.system}: {s.note}" for s in stock if s.note)
    notes = [f"- {n}: {SYSTEMS[n].notes}" + (f"; {LEFT_OUT[n]}" if LEFT_OUT[n] else "") for n in names]
    return "\n".join(
        [*parts, "", *notes, *(f"{note} ({count} of the trials)" for note, count in said.items())]
    )


def _stock_table(stock: Sequence[StockTrial]) -> str:
    lines = []
    for name in dict.fromkeys(s.system for s in stock):
        own = [s for s in stock if s.system == name]
        joins = [s.join_s for s in own if s.join_s is not None]
        kills = [s.kill_s for s in own if s.kill_s is not None]
        leaders = [s.kill_leader_s for s in own if s.kill_leader_s is not None]
        lines.append([name, *map(result_file.spread, (joins, kills, leaders))])
    heads = ["host joins -> epoch of all", "host killed -> next epoch", "leader's host killed -> next epoch"]
    return result_file.table(["launcher", *heads], lines)


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--only", choices=sorted(SYSTEMS), action="append", help="this system (may come again)"
    )
    names = [row.name for row in ROWS]
    parser.add_argument(
        "--row",
        choices=[*names, STOCK_ROW, ENDINGS_ROWS],
        action="append",
        help=f"this row (may come again); {ENDINGS_ROWS}: {', '.join(row.name for row in ENDINGS)}",
    )
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--logs", type=Path, help="directory that gets every trial's logs")
    args = parser.parse_args()
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    compile_packages()
    about = result_file.circumstances()
    wanted = tuple(args.row or [*names, STOCK_ROW])
    if ENDINGS_ROWS in wanted:
        wanted += tuple(row.name for row in ENDINGS)
    systems = [n for n in SYSTEMS if not args.only or n in args.only]
    trials: list[Trial] = []
    stock: list[StockTrial] = []
    skipped: set[str] = set()
    for number in range(1, args.repeat + 1):
        for name in systems:
            if name in skipped or (name == "torchrun" and number > MOST_TORCHRUN_TRIALS):
                continue
            print(f"round {number}, {name}", file=sys.stderr, flush=True)
            try:
                if any(row.name in wanted for row in PLANS[name]):
                    trials.append(one_trial(name, wanted, args.logs))
                if name == "bagua" and any(row.name in wanted for row in ENDINGS):
                    trials.append(endings_trial(wanted, args.logs))
                if name in STOCK and STOCK_ROW in wanted:
                    stock.append(stock_trial(name, args.logs))
            except NotInstallable as error:
                skipped.add(name)
                trials.append(Trial(name, notes=[f"not measured: {error}"]))
            except (
                LabError,
                AssertionError,
            ) as error:  # its infrastructure did not come up: the others go on
                trials.append(Trial(name, notes=[f"no trial: {error}"]))
    rows = [row for row in ROWS if row.name in wanted]
    words = in_words(trials, stock, rows)
    print(words)
    if args.keep:
        values = {"trials": [asdict(t) for t in trials], "stock": [asdict(s) for s in stock]}
        for path in result_file.keep("faults", about, words, values):
            print(f"kept: {path.relative_to(result_file.ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
