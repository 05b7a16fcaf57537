"""Plots the trainings of benchmarks.fidelity: loss by samples, and the final losses beside DDP's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.fidelity_runs import Trained
from benchmarks.fidelity_table import WITHIN, Row
from benchmarks.fidelity_tasks import TASKS
from benchmarks.plots import Figure, round_ticks, style

_SMOOTHED_OVER = 15  # steps


def figures(rows: Sequence[Row], trained: Sequence[Trained]) -> dict[str, Figure]:
    return {"loss": partial(_loss, trained), "ratio": partial(_ratio, rows)}


def _loss(trained: Sequence[Trained], pyplot: Any) -> Any:
    tasks = list(dict.fromkeys(t.task for t in trained))
    figure, grid = pyplot.subplots(
        1, len(tasks), figsize=(5.4 * len(tasks), 4.4), squeeze=False, layout="constrained"
    )
    for panel, task in zip(grid.flat, tasks, strict=True):
        for system in dict.fromkeys(t.system for t in trained if t.task == task):
            curves = [t.curve for t in trained if (t.task, t.system) == (task, system)]
            # Rounds: see fidelity_runs.py
            mean = [statistics.fmean(losses) for losses in zip(*curves, strict=False)]
            shown = _smooth(mean)
            samples = [(step + 1) * TASKS[task].global_batch for step in range(len(shown))]
            look = {**style(system), "linewidth": 1.2}
            panel.plot(samples, shown, label=system, markevery=[-1], markersize=6, **look)
        panel.set_yscale("log")
        lowest, highest = panel.get_ylim()
        panel.set_yticks(*round_ticks([lowest, highest], digits=(1, 2, 3, 4, 5, 7)))
        panel.minorticks_off()
        panel.set_title(task, fontsize=10)
        panel.set_xlabel("samples, all workers")
        panel.grid(alpha=0.3)
    grid.flat[0].set_ylabel(f"training loss, mean of seeds over {_SMOOTHED_OVER} steps")
    entries: dict[str, Any] = {}
    for panel in grid.flat:
        handles, labels = panel.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _smooth(losses: Sequence[float]) -> list[float]:
    """Each with the mean of those before it."""
    return [statistics.fmean(losses[max(0, end - _SMOOTHED_OVER) : end]) for end in range(1, len(losses) + 1)]


def _ratio(rows: Sequence[Row], pyplot: Any) -> Any:
    tasks = list(dict.fromkeys(row.task for row in rows))
    systems = list(dict.fromkeys(r.system for r in rows if r.system != r.baseline and r.train_ratio))
    figure, grid = pyplot.subplots(
        1,
        len(tasks),
        figsize=(5.4 * len(tasks), 1.6 + 0.34 * len(systems)),
        squeeze=False,
        sharey=True,
        layout="constrained",
    )
    for panel, task in zip(grid.flat, tasks, strict=True):
        panel.axvspan(1 / WITHIN, WITHIN, color="#dddddd", zorder=0)
        panel.axvline(1.0, color="#111111", linewidth=0.8, zorder=1)
        for row in rows:
            if row.task != task or row.system not in systems or not row.train_ratio:
                continue
            place, colour = systems.index(row.system), style(row.system)["color"]
            for ratios, shift, mark in ((row.train_ratio, -0.14, "o"), (row.held_out_ratio, 0.14, "D")):
                heights = [place + shift] * len(ratios)
                panel.scatter(ratios, heights, s=16, marker=mark, facecolors="none", edgecolors=colour)
                panel.scatter([statistics.fmean(ratios)], heights[:1], s=46, marker=mark, color=colour)
        panel.set_title(task, fontsize=10)
        panel.set_xlabel("final loss / DDP's")
        panel.grid(alpha=0.3, axis="x")
    grid.flat[0].set_yticks(range(len(systems)), systems, fontsize=8)
    grid.flat[0].set_ylim(len(systems) - 0.5, -0.5)
    figure.suptitle(
        "Circles: training, diamonds: held out; filled: mean, hollow: a seed; grey: within 2 %", fontsize=9
    )
    return figure
