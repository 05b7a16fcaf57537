"""Plots the runs of benchmarks.tradeoff: throughput by bandwidth; an epoch's time, and the loss against time,
by condition of the network."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.plots import Figure, round_ticks, style
from benchmarks.rivals.workload import CLASSES
from benchmarks.tradeoff_systems import BASELINE, SYSTEMS, Condition, Run
from benchmarks.tradeoff_table import Row

EPOCH_SAMPLES = 60_000
_UNITS_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SMOOTHED_OVER = 4  # steps
_HIGHEST_LOSS = 1.15 * math.log(CLASSES)  # a model that knows nothing is at the logarithm


def bits_per_s(rate: str) -> float:
    """Of a rate as tc takes it. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"rate {rate!r}; use something like 100mbit or 1gbit")
    return float(match[1]) * _UNITS_BITS[match[2]]


def figures(rows: Sequence[Row], runs: Sequence[Run]) -> dict[str, Figure]:
    return {
        "throughput": partial(_throughput, rows),
        "epoch-time": partial(_epoch_time, rows),
        "loss": partial(_loss, runs),
    }


def _throughput(rows: Sequence[Row], pyplot: Any) -> Any:
    delays = sorted({row.condition.delay_ms for row in rows})
    figure, panels = _panels(pyplot, len(delays), len(delays), (5.2, 4.6))
    for panel, delay_ms in zip(panels, delays, strict=True):
        own = [row for row in rows if row.condition.delay_ms == delay_ms]
        for system in dict.fromkeys(row.system for row in own):
            points = sorted(
                (bits_per_s(r.condition.rate) / 1e6, r.samples_per_s) for r in own if r.system == system
            )
            panel.plot(*zip(*points, strict=True), label=system, markersize=6, **style(system))
        panel.set_xscale("log")
        panel.set_yscale("log")
        ticks = sorted({bits_per_s(row.condition.rate) / 1e6 for row in own})
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.set_yticks(*round_ticks([row.samples_per_s for row in own], around=2.5))
        panel.set_xlabel("link, Mbit/s")
        panel.set_title("no delay" if not delay_ms else f"{delay_ms:g} ms each way", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("samples/s, all workers")
    figure.suptitle("Throughput by bandwidth")
    _legend(figure, panels)
    return figure


def _epoch_time(rows: Sequence[Row], pyplot: Any) -> Any:
    conditions = list(dict.fromkeys(row.condition for row in rows))
    systems = list(dict.fromkeys(row.system for row in rows))
    figure, panels = _panels(pyplot, len(conditions), 3, (4.4, 0.6 + 0.28 * len(systems)))
    for panel, condition in zip(panels, conditions, strict=False):
        own = {row.system: row for row in rows if row.condition == condition}
        for place, system in enumerate(systems):
            if system not in own:
                continue
            minutes = EPOCH_SAMPLES / own[system].samples_per_s / 60
            panel.barh(place, minutes, color=style(system)["color"])
            ratio = own[system].ratio
            beside = "" if ratio is None or system == BASELINE else f"  ({ratio:.2g}x)"
            panel.text(minutes, place, f" {minutes:.3g}{beside}", va="center", fontsize=7)
        panel.set_yticks(range(len(systems)), systems, fontsize=8)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.4 * EPOCH_SAMPLES / min(row.samples_per_s for row in own.values()) / 60)
        panel.set_title(str(condition), fontsize=10)
        panel.set_xlabel(f"minutes for {EPOCH_SAMPLES:,} samples".replace(",", " "), fontsize=8)
    figure.suptitle("Epoch time by condition of the network (in brackets: times DDP's throughput)")
    return figure


def _loss(runs: Sequence[Run], pyplot: Any) -> Any:
    conditions: list[Condition] = list(dict.fromkeys(run.condition for run in runs))
    figure, panels = _panels(pyplot, len(conditions), 3, (4.6, 3.6))
    for panel, condition in zip(panels, conditions, strict=False):
        shown: set[str] = set()
        for run in runs:  # the first of each system: several on top of each other show nothing more
            if run.condition != condition or run.system in shown or not SYSTEMS[run.system].learns:
                continue
            shown.add(run.system)
            times_s, losses = zip(*_smooth(run.losses), strict=True)
            look = style(run.system)
            panel.plot(times_s, losses, label=run.system, **look, markevery=[-1], markersize=6)
        panel.set_xscale("log")
        ends_s = [end_s for run in runs if run.condition == condition for end_s, _ in run.losses]
        panel.set_xticks(*round_ticks(ends_s))
        panel.minorticks_off()
        panel.set_title(str(condition), fontsize=10)
        panel.set_xlabel("seconds since the first step began")
        panel.grid(alpha=0.3)
    for panel in panels:
        panel.set_ylabel("loss")
        panel.set_ylim(0, _HIGHEST_LOSS)  # one that leaves it has lost its way
    title = f"Training loss against time, the workers' mean over {_SMOOTHED_OVER} steps; a mark ends a run"
    if any(run.system.startswith("qadam") for run in runs):
        title += "\nQAdam is left out: its warm-up was cut short to measure what the steps after it cost"
    figure.suptitle(title, fontsize=10)
    _legend(figure, panels)
    return figure


def _smooth(losses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Each with the mean of the last few."""
    shown = []
    for end in range(1, len(losses) + 1):
        window = losses[max(0, end - _SMOOTHED_OVER) : end]
        shown.append((losses[end - 1][0], sum(loss for _, loss in window) / len(window)))
    return shown


def _panels(pyplot: Any, count: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    columns = min(columns, count)
    lines = math.ceil(count / columns)
    figure, grid = pyplot.subplots(
        lines,
        columns,
        figsize=(size[0] * columns, size[1] * lines),
        squeeze=False,
        layout="constrained",
    )
    panels = list(grid.flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    return figure, panels[:count]


def _legend(figure: Any, panels: Sequence[Any]) -> None:
    entries: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=8, frameon=False)
