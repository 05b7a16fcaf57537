"""Draws a job's generations over time: how many workers it had, why that changed, and what each change cost.

Knows events only. matplotlib (extra `plot`) is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import plain_line
from bagua_agent.history.job_history import EventKind, JobEvent

MOST_CAUSES = 30  # that are written below the plot: the newest ones
_LONGEST_CAUSE = 125
# Hues that differ for colour-blind eyes too.
_COLOURS = {"PLANNED": "#0072b2", "FAILOVER": "#d55e00", "GATHERING": "#777777", "RESTART": "#9a6324"}
_WORDS = {"PLANNED": "planned", "FAILOVER": "failover", "GATHERING": "before the loop", "RESTART": "restart"}


@dataclass(frozen=True, slots=True)
class Change:
    """A generation in the plot.

    at_s: since the first event, when it was in force, or formed where that is not known. lost_s: time without steps, or
    None where it is not known.
    """

    number: int
    kind: str
    at_s: float
    world_size: int
    cause: str
    lost_s: float | None


def changes_of(events: Sequence[JobEvent]) -> tuple[list[Change], float]:
    """Returns the changes in the order of their numbers, and the time of the last event. Pure.

    Times are of the clocks of several hosts, so a change that seems to come before its predecessor is set to the
    predecessor's time.
    """
    known = [event for event in events if event.time_unix_s > 0]
    first_s = min((event.time_unix_s for event in known), default=0.0)
    last_s = max((event.time_unix_s for event in known), default=0.0)
    formed = {e.generation: e for e in known if e.kind is EventKind.GENERATION_FORMED}
    in_force = {e.generation: e for e in known if e.kind is EventKind.GENERATION_IN_FORCE}
    found: list[Change] = []
    for number, event in sorted(formed.items()):
        entered = in_force.get(number)
        at_s = (entered or event).time_unix_s - first_s
        if found:
            at_s = max(at_s, found[-1].at_s)
        lost_s = None if entered is None else entered.lost_s
        found.append(
            Change(number, event.generation_kind, at_s, event.world_size, plain_line(event.text), lost_s)
        )
    return found, last_s - first_s


def cause_line(change: Change, before: Change | None) -> str:
    """Returns the change's line in the list below the plot."""
    was = 0 if before is None else before.world_size
    size = f"{was} → {change.world_size}" if was != change.world_size else f"{change.world_size}"
    lost = "" if change.lost_s is None else f"{change.lost_s:.2f} s lost; "
    kind = _WORDS.get(change.kind, change.kind.lower())
    # the line says the generation's number once more, before the first colon
    cause = change.cause.partition(": ")[2] or change.cause
    text = f"{change.number}  at {change.at_s:.1f} s, {kind}, {size}: {lost}{cause}"
    return text if len(text) <= _LONGEST_CAUSE else text[: _LONGEST_CAUSE - 1] + "…"


def plot_events(job_id: str, events: Sequence[JobEvent], path: Path) -> None:
    """Writes the plot; its format follows from the path's suffix. Raises UserError for a job without generations, an
    unknown suffix, a file that can't be written, and where matplotlib is missing."""
    changes, end_s = changes_of(events)
    if not changes:
        raise UserError(f"job {job_id!r} has had no generation yet, so there is nothing to plot")
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("--plot needs matplotlib; pip install 'bagua-elastic[plot]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = _draw(pyplot, job_id, changes, max(end_s, changes[-1].at_s))
    try:
        figure.savefig(path, dpi=130, bbox_inches="tight")
    except (OSError, ValueError) as error:  # ValueError: no such format
        raise UserError(f"can't write the plot {str(path)!r}: {error}") from error
    finally:
        pyplot.close(figure)


def _draw(pyplot: Any, job_id: str, changes: Sequence[Change], end_s: float) -> Any:
    figure, (sizes, costs) = pyplot.subplots(
        2, 1, figsize=(9, 4.8), sharex=True, gridspec_kw={"height_ratios": (3, 1), "hspace": 0.12}
    )
    ends_s = [*(change.at_s for change in changes[1:]), end_s]
    for change, until_s in zip(changes, ends_s, strict=True):
        colour = _COLOURS.get(change.kind, "#000000")
        sizes.fill_between(
            [change.at_s, until_s], change.world_size, step="post", color="#d5ecf8", linewidth=0
        )
        sizes.plot([change.at_s, until_s], [change.world_size] * 2, color="#333333", linewidth=1.8)
        sizes.plot([change.at_s], [change.world_size], "o", color=colour, markersize=6)
        sizes.annotate(
            str(change.number), (change.at_s, change.world_size), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=8, color=colour,
        )  # fmt: skip
        if change.lost_s:
            costs.vlines(change.at_s, 0, change.lost_s, color=colour, linewidth=3)
    most = max(change.world_size for change in changes)
    sizes.set_ylim(0, most * 1.25 + 0.2)
    sizes.yaxis.get_major_locator().set_params(integer=True)
    sizes.set_ylabel("workers")
    sizes.set_title(f"Generations of job {job_id}", fontsize=11)
    kinds = dict.fromkeys(change.kind for change in changes)
    for kind in kinds:
        sizes.plot([], [], "o", color=_COLOURS.get(kind, "#000000"), label=_WORDS.get(kind, kind.lower()))
    sizes.legend(loc="lower right", fontsize=8, ncols=len(kinds))
    costs.set_ylim(bottom=0)
    costs.set_ylabel("lost, s")
    costs.set_xlabel("seconds since the job was created")
    costs.grid(axis="y", alpha=0.3)
    before = [None, *changes[:-1]]
    lines = [cause_line(c, b) for c, b in zip(changes, before, strict=True)]
    shown = lines[-MOST_CAUSES:]
    if len(shown) < len(lines):
        shown = [f"({len(lines) - len(shown)} earlier generations are not listed)", *shown]
    figure.text(0.06, -0.03, "\n".join(shown), va="top", ha="left", fontsize=7.5, family="monospace")
    return figure
