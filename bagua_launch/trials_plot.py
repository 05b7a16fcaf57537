"""Draws the trials of a study: their rates over the time of training, and the settings by rate, the kept ones marked.

Knows studies only. matplotlib (extra `plot`) is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_agent.autotune.study_records import Study
from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import plain_line

MOST_BARS = 24  # the fastest ones
_LONGEST_LABEL = 70
_CHOSEN, _SCRIPTED, _OTHER = "#d55e00", "#0072b2", "#9aa5ad"  # hues that differ for colour-blind eyes too


@dataclass(frozen=True, slots=True)
class Point:
    """A trial in the plot.

    at_s: time of training of the study at its end. best: the highest rate so far. is_chosen: its settings are the ones
    that the study keeps by now.
    """

    number: int
    at_s: float
    label: str
    rate: float
    best: float
    is_chosen: bool
    is_scripted: bool


def points_of(study: Study) -> list[Point]:
    """Returns the points in the order of the trials. Pure."""
    chosen = study.best
    found: list[Point] = []
    at_s = best = 0.0
    for number, trial in enumerate(study.trials, 1):
        at_s = max(trial.ended_s, at_s + (0.0 if trial.ended_s else trial.seconds))
        best = max(best, trial.rate)
        label = plain_line(str(trial.settings))
        if len(label) > _LONGEST_LABEL:
            label = label[: _LONGEST_LABEL - 1] + "…"
        scripted = trial.settings.is_empty
        found.append(Point(number, at_s, label, trial.rate, best, trial is chosen, scripted))
    return found


def plot_trials(job_id: str, study: Study, path: Path) -> None:
    """Writes the plot; its format follows from the path's suffix. Raises UserError for a study without trials, an
    unknown suffix, a file that can't be written, and where matplotlib is missing."""
    points = points_of(study)
    if not points:
        raise UserError(
            f"study {study.number} of job {job_id!r} has ended no trial yet, so there is nothing to plot"
        )
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib; pip install 'bagua-elastic[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _draw(pyplot, job_id, study, points)
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise UserError(f"can't write the plot {str(path)!r}: {error}") from error
    finally:
        pyplot.close(figure)


def _colour(point: Point) -> str:
    return _CHOSEN if point.is_chosen else _SCRIPTED if point.is_scripted else _OTHER


def _draw(pyplot: Any, job_id: str, study: Study, points: Sequence[Point]) -> Any:
    bars = sorted(points, key=lambda p: p.rate)[-MOST_BARS:]
    figure, (over_time, by_setting) = pyplot.subplots(
        2,
        1,
        figsize=(10, 3.2 + 0.26 * len(bars) + 0.8),
        gridspec_kw={"height_ratios": (3.2, 0.26 * len(bars) + 0.8)},
    )
    over_time.step(
        [p.at_s for p in points], [p.best for p in points], where="post", color="#333333", linewidth=1.2,
        label="best so far",
    )  # fmt: skip
    for point in points:
        over_time.plot([point.at_s], [point.rate], "o", color=_colour(point), markersize=6)
        over_time.annotate(
            str(point.number), (point.at_s, point.rate), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=7, color=_colour(point),
        )  # fmt: skip
    for colour, label in ((_CHOSEN, "kept"), (_SCRIPTED, "as the script says"), (_OTHER, "others")):
        if any(_colour(p) == colour for p in points):
            over_time.plot([], [], "o", color=colour, label=label)
    over_time.set_ylim(0, max(p.rate for p in points) * 1.18)
    over_time.set_xlabel("seconds of training in this study")
    over_time.set_ylabel("steps/s")
    over_time.grid(alpha=0.3)
    over_time.legend(loc="lower right", fontsize=8, ncols=4)
    world = plain_line(study.world)
    over_time.set_title(f"Trials of job {job_id}, study {study.number}: {world}", fontsize=11)
    by_setting.barh(range(len(bars)), [p.rate for p in bars], color=[_colour(p) for p in bars], height=0.7)
    by_setting.set_yticks(range(len(bars)), [f"{p.label}  ({p.number})" for p in bars], fontsize=8)
    for place, point in enumerate(bars):
        kept = "  kept" if point.is_chosen else ""
        by_setting.annotate(f" {point.rate:.3g}{kept}", (point.rate, place), va="center", fontsize=8)
    by_setting.set_xlim(0, max(p.rate for p in bars) * 1.15)
    by_setting.set_xlabel("steps/s, by settings (number of the trial)")
    figure.tight_layout()
    return figure
