"""Draws the README's plot from the kept rescale result: seconds that training stands still at each kind of change.

    python -m benchmarks.rescale_plot benchmarks/results/rescale-2026-11-30.json

writes the plot beside the result. It measures nothing.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots

# What a row shows, and the value of a trial that it takes; as in the result's table.
ROWS = {
    "a host is killed": "kill_s",
    "a host's link is cut": "cut_s",
    "a host joins": "join_pause_s",
}
SYSTEMS = {"bagua": "#0072b2", "torchft": "#999999", "torchrun": "#555555"}


def medians(trials: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float | None]:
    """Median seconds by system and row; None where no trial measured it."""
    found: dict[tuple[str, str], float | None] = {}
    for system in SYSTEMS:
        for row, value in ROWS.items():
            measured = [
                trial[value] for trial in trials if trial["system"] == system and trial[value] is not None
            ]
            found[system, row] = statistics.median(measured) if measured else None
    return found


def draw(pyplot: Any, values: Mapping[tuple[str, str], float | None]) -> Any:
    """One group of bars a row, on a logarithmic axis; each bar says its value."""
    figure, axes = pyplot.subplots(figsize=(7.5, 2.9))
    height = 0.8 / len(SYSTEMS)
    for place, (system, colour) in enumerate(SYSTEMS.items()):
        for index, row in enumerate(ROWS):
            value = values[system, row]
            y = index + (place - (len(SYSTEMS) - 1) / 2) * height
            if value is None:
                axes.text(0.0108, y, f"{system}: not measured", va="center", fontsize=8, color=colour)
                continue
            axes.barh(y, value - 0.01, height * 0.9, left=0.01, color=colour)
            axes.text(value * 1.06, y, f"{system} {value:.2g} s", va="center", fontsize=8, color=colour)
    axes.set_xscale("log")
    axes.set_xlim(0.01, 150)
    axes.set_xticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
    axes.set_yticks(range(len(ROWS)), list(ROWS))
    axes.invert_yaxis()
    axes.set_xlabel("seconds in which the other hosts train no step (log scale, less is better)")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(result: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = draw(pyplot, medians(json.loads(result.read_text())["values"]))
    path = result.with_name(f"{result.stem}-changes.png")
    figure.savefig(path, dpi=plots.DPI, bbox_inches="tight")
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.rescale_plot RESULT.json")
    print(main(Path(sys.argv[1])))
