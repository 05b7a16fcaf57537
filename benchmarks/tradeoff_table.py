"""Summarizes the runs of benchmarks.tradeoff: cost of a step, throughput beside DDP, and the aims reached.

Pure: from runs to numbers and words.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import result_file
from benchmarks.tradeoff_systems import BASELINE, SYSTEMS, Condition, Run


@dataclass(frozen=True, slots=True)
class Row:
    """One system under one condition. step_s: what a step costs, see `row`; ratio: DDP's over it. busy: the part of the
    time that the steps would take without any exchange, of a system most of whose steps have none."""

    system: str
    condition: Condition
    step_s: float
    spread: str
    samples_per_s: float
    sent_bytes: float
    ratio: float | None
    aim: float | None
    rounds: int | None
    busy: float | None = None

    @property
    def is_reached(self) -> bool | None:
        """None: nothing to compare. The ratio counts as it is shown."""
        if self.aim is None or self.ratio is None:
            return None
        return round(self.ratio, 2) >= self.aim


def rows(runs: Sequence[Run]) -> list[Row]:
    """One for each condition and system, in the order in which they were measured first."""
    keys = dict.fromkeys((run.condition, run.system) for run in runs)
    ddp_s = {c: _cost_s(own) for c, system in keys if system == BASELINE and (own := _of(runs, c, system))}
    ordered = sorted(keys, key=lambda key: list(dict.fromkeys(c for c, _ in keys)).index(key[0]))
    return [row(_of(runs, c, system), ddp_s.get(c)) for c, system in ordered]


def row(own: Sequence[Run], ddp_s: float | None) -> Row:
    """own: of one system and condition. A step costs the median of all; where the cost is uneven, the mean."""
    first = own[0]
    system = SYSTEMS[first.system]
    cost_s = _cost_s(own)
    if system.is_uneven:
        means = [statistics.fmean(run.step_s) for run in own]
        dearest_s = max(step_s for run in own for step_s in run.step_s)
        count = sum(len(run.step_s) for run in own)
        spread = f"mean {result_file.spread(means, digits=3)}, dearest {dearest_s:.3f} s of {count}"
    else:
        spread = result_file.spread([s for run in own for s in run.step_s], digits=3)
    rounds = [run.rounds for run in own if run.rounds is not None]
    return Row(
        system=first.system,
        condition=first.condition,
        step_s=cost_s,
        spread=spread,
        samples_per_s=first.global_batch / cost_s,
        sent_bytes=statistics.fmean(run.sent_bytes for run in own),
        ratio=None if ddp_s is None else ddp_s / cost_s,
        aim=None if first.condition.delay_ms else system.aims.get(first.condition.rate),
        rounds=sum(rounds) if rounds else None,
        busy=min(1.0, statistics.median(s for run in own for s in run.step_s) / cost_s)
        if system.is_uneven
        else None,
    )


def _of(runs: Sequence[Run], condition: Condition, system: str) -> list[Run]:
    return [run for run in runs if (run.condition, run.system) == (condition, system)]


def _cost_s(own: Sequence[Run]) -> float:
    if SYSTEMS[own[0].system].is_uneven:
        return statistics.fmean(statistics.fmean(run.step_s) for run in own)
    return statistics.median(s for run in own for s in run.step_s)


def in_words(found: Sequence[Row]) -> str:
    parts = []
    for condition in dict.fromkeys(row.condition for row in found):
        head = ["system", "one step", "samples/s", "x DDP", "aim", "reached", "busy", "sent a step"]
        cells = [
            [
                row.system,
                row.spread,
                f"{row.samples_per_s:.1f}",
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                "-" if row.aim is None else f"{row.aim:g}",
                {True: "yes", False: "no", None: "-"}[row.is_reached],
                "-" if row.busy is None else f"{row.busy:.0%}",
                f"{row.sent_bytes / 1e6:.1f} MB"
                + (f", {row.rounds} rounds" if row.rounds is not None else ""),
            ]
            for row in found
            if row.condition == condition
        ]
        parts += [f"## {condition}", "", result_file.table(head, cells), ""]
    return "\n".join(parts)
