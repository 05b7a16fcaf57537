"""Summarizes the runs of benchmarks.tradeoff: cost of a step, throughput beside DDP and beside
workers without communication, and the aims reached.

Pure: from runs to numbers and words.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import result_file
from benchmarks.tradeoff_systems import BASELINE, SYSTEMS, Condition, Run
from benchmarks.tradeoff_worker import ALONE


@dataclass(frozen=True, slots=True)
class Row:
    """One system under one condition. step_s: what a step costs, see `row`; ratio: DDP's over it. busy: the part of the
    time that the steps would take without any exchange, of a system most of whose steps have none. utilisation: the
    throughput over that of the same workers without communication, of each repeat; the mean is at least
    least_utilisation if that is reached."""

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
    utilisation: tuple[float, ...] = ()
    least_utilisation: float | None = None

    @property
    def is_reached(self) -> bool | None:
        """None: nothing to compare. The ratio counts as it is shown."""
        if self.aim is None or self.ratio is None:
            return None
        return round(self.ratio, 2) >= self.aim

    @property
    def is_utilised(self) -> bool | None:
        """As `is_reached`; of the utilisation, as it is shown."""
        if self.least_utilisation is None or not self.utilisation:
            return None
        return round(statistics.fmean(self.utilisation), 3) >= self.least_utilisation


def rows(runs: Sequence[Run]) -> list[Row]:
    """One for each condition and system, in the order in which they were measured first."""
    keys = dict.fromkeys((run.condition, run.system) for run in runs)
    ddp_s = {c: _cost_s(own) for c, system in keys if system == BASELINE and (own := _of(runs, c, system))}
    ordered = sorted(keys, key=lambda key: list(dict.fromkeys(c for c, _ in keys)).index(key[0]))
    return [row(_of(runs, c, system), ddp_s.get(c), _of(runs, c, ALONE)) for c, system in ordered]


def utilisation(own: Sequence[Run], alone: Sequence[Run]) -> tuple[float, ...]:
    """Throughput of each run over that of the run of the same repeat without communication, where there is one.

    This equals the share of the time in which the workers compute, if their steps take as long as alone.
    """
    most_per_s = {run.repeat: run.samples_per_s for run in alone}
    return tuple(run.samples_per_s / most_per_s[run.repeat] for run in own if run.repeat in most_per_s)


def row(own: Sequence[Run], ddp_s: float | None = None, alone: Sequence[Run] = ()) -> Row:
    """own, alone: of one system and condition. A step costs the median of all; where the cost is uneven, the mean."""
    first = own[0]
    system = SYSTEMS[first.system]
    cost_s = _cost_s(own)
    steps_s = [step_s for run in own for step_s in run.step_s]
    if system.is_uneven:
        means = [_mean_s(run) for run in own]
        dearest_s = max(steps_s)
        count = len(steps_s)
        spread = f"mean {result_file.spread(means, digits=3)}, dearest {dearest_s:.3f} s of {count}"
    else:
        spread = result_file.spread(steps_s, digits=3)
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
        busy=min(1.0, statistics.median(steps_s) / statistics.fmean(steps_s))
        if system.is_uneven and system.name != ALONE
        else None,
        utilisation=utilisation(own, alone),
        least_utilisation=None
        if first.condition.delay_ms
        else system.least_utilisation.get(first.condition.rate),
    )


def _of(runs: Sequence[Run], condition: Condition, system: str) -> list[Run]:
    return [run for run in runs if (run.condition, run.system) == (condition, system)]


def _cost_s(own: Sequence[Run]) -> float:
    if SYSTEMS[own[0].system].is_uneven:
        return statistics.fmean(_mean_s(run) for run in own)
    return statistics.median(s for run in own for s in run.step_s)


def _mean_s(run: Run) -> float:
    """Of a global batch, by the samples of all workers: in rounds and alone each takes its own number of steps."""
    return run.global_batch / run.samples_per_s


def _utilisation_in_words(row: Row) -> str:
    if not row.utilisation:
        return "-"
    words = f"{statistics.fmean(row.utilisation):.1%}"
    if len(row.utilisation) > 1:
        words += f" ({min(row.utilisation):.1%} to {max(row.utilisation):.1%}, n={len(row.utilisation)})"
    if row.is_utilised is not None:
        words += f"; at least {row.least_utilisation:.0%}: {'yes' if row.is_utilised else 'no'}"
    return words


def in_words(found: Sequence[Row]) -> str:
    parts = []
    for condition in dict.fromkeys(row.condition for row in found):
        head = [
            "system",
            "one step",
            "samples/s",
            "x DDP",
            "aim",
            "reached",
            "busy",
            "utilisation",
            "sent a step",
        ]
        cells = [
            [
                row.system,
                row.spread,
                f"{row.samples_per_s:.1f}",
                "-" if row.ratio is None else f"{row.ratio:.2f}",
                "-" if row.aim is None else f"{row.aim:g}",
                {True: "yes", False: "no", None: "-"}[row.is_reached],
                "-" if row.busy is None else f"{row.busy:.0%}",
                _utilisation_in_words(row),
                f"{row.sent_bytes / 1e6:.1f} MB"
                + (f", {row.rounds} rounds" if row.rounds is not None else ""),
            ]
            for row in found
            if row.condition == condition
        ]
        parts += [f"## {condition}", "", result_file.table(head, cells), ""]
    return "\n".join(parts)
