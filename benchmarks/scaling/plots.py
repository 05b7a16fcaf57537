"""Draws the study: efficiency by size, goodput by failures, pauses by size, and published points beside predictions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmarks.plots import Figure, round_ticks, style
from benchmarks.scaling.end_to_end import PUBLISHED_GAIN, Gain
from benchmarks.scaling.published import Point as PublishedPoint
from benchmarks.scaling.study import Life, Point

_SYSTEM_STYLES = {
    "bagua": {"color": "#0072b2", "marker": "o"},
    "torchft": {"color": "#e69f00", "marker": "^"},
    "torchrun": {"color": "#777777", "marker": "s"},
}
_RATE_DASHES = {"month": ":", "week": "--", "day": "-"}
PAUSES_OF = ("BERT-Large", "25 Gbit/s")
"""Model and network of the plot of pauses."""
_CONDITION_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc3377", "#e69f00")


def figures(
    points: Sequence[Point],
    lives: Sequence[Life],
    published: Sequence[PublishedPoint],
    whole: Sequence[Gain],
) -> dict[str, Figure]:
    return {
        "efficiency": partial(_efficiency, points),
        "goodput": partial(_goodput, lives),
        "membership": partial(_membership, lives),
        "published": partial(_published, published),
        "end-to-end": partial(_whole, whole),
    }


def _efficiency(points: Sequence[Point], pyplot: Any) -> Any:
    models = list(dict.fromkeys(p.model for p in points))
    links = list(dict.fromkeys(p.link for p in points))
    sizes = sorted({p.nodes for p in points})
    figure, panels = pyplot.subplots(
        len(models), len(links), figsize=(3.6 * len(links), 2.9 * len(models)), squeeze=False, sharey=True
    )
    for row, model in zip(panels, models, strict=True):
        for panel, link in zip(row, links, strict=True):
            own = [p for p in points if (p.model, p.link) == (model, link)]
            for algorithm in dict.fromkeys(p.algorithm for p in own):
                line = [(p.nodes, p.efficiency) for p in own if p.algorithm == algorithm]
                panel.plot(*zip(*line, strict=True), label=algorithm, markersize=4, **style(algorithm))
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes], fontsize=7)
            panel.minorticks_off()
            panel.set_ylim(0, 1.05)
            panel.grid(alpha=0.3)
            panel.set_title(f"{model}, {link}", fontsize=9)
        row[0].set_ylabel("scaling efficiency", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("nodes of 8 GPUs", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=8)
    return figure


def _goodput(lives: Sequence[Life], pyplot: Any) -> Any:
    """Without silent failures, which the table has."""
    models = list(dict.fromkeys(life.model for life in lives))
    links = list(dict.fromkeys(life.link for life in lives))
    sizes = sorted({life.nodes for life in lives})
    figure, panels = pyplot.subplots(
        len(models), len(links), figsize=(3.6 * len(links), 2.7 * len(models)), squeeze=False, sharey=True
    )
    for row, model in zip(panels, models, strict=True):
        for panel, link in zip(row, links, strict=True):
            own = [life for life in lives if (life.model, life.link, life.silent_share) == (model, link, 0.0)]
            for (rate, dashes), (system, look) in product(_RATE_DASHES.items(), _SYSTEM_STYLES.items()):
                found = [e for e in own if (e.system, e.rate) == (system, rate)]
                line = [(e.nodes, 1 - e.account.goodput) for e in found]
                panel.plot(*zip(*line, strict=True), linestyle=dashes, linewidth=1.4, markersize=4, **look)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
            panel.set_yscale("log")
            panel.set_ylim(1e-3, 1.2)
            panel.minorticks_off()
            panel.set_yticks([1e-3, 1e-2, 1e-1, 1], ["0.1%", "1%", "10%", "100%"], fontsize=8)
            panel.grid(alpha=0.3)
            panel.set_title(f"{model}, {link}", fontsize=9)
        row[0].set_ylabel("throughput lost", fontsize=9)
    for panel in panels[-1]:
        panel.set_xlabel("nodes", fontsize=9)
    for system, look in _SYSTEM_STYLES.items():
        panels[0][0].plot([], [], label=system, **look)
    for rate, dashes in _RATE_DASHES.items():
        panels[0][0].plot([], [], color="#444444", linestyle=dashes, label=f"1 failure of a node a {rate}")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0.025, 1, 1))
    figure.legend(handles, labels, loc="lower center", ncols=6, fontsize=8)
    return figure


def _membership(lives: Sequence[Life], pyplot: Any) -> Any:
    """Of one model and network."""
    lives = [life for life in lives if (life.model, life.link) == PAUSES_OF]
    figure, (loss, join) = pyplot.subplots(1, 2, figsize=(9.2, 3.6))
    for panel, name, title in (
        (loss, "loss_pause_s", f"{', '.join(PAUSES_OF)}: a node is lost"),
        (join, "join_pause_s", "a node joins, with the copy of the state"),
    ):
        for system, look in _SYSTEM_STYLES.items():
            line = sorted({(life.nodes, getattr(life, name)) for life in lives if life.system == system})
            panel.plot(*zip(*line, strict=True), label=system, linewidth=1.6, **look)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        sizes = sorted({life.nodes for life in lives})
        panel.set_xticks(sizes, [str(size) for size in sizes])
        values = [getattr(life, name) for life in lives]
        panel.set_yticks(*round_ticks(values, around=2.0))
        panel.minorticks_off()
        panel.set_xlabel("nodes")
        panel.set_title(title, fontsize=10)
        panel.grid(alpha=0.3)
    loss.set_ylabel("all others pause, s")
    loss.legend(fontsize=8)
    figure.tight_layout()
    return figure


def _published(points: Sequence[PublishedPoint], pyplot: Any) -> Any:
    models = list(dict.fromkeys(p.model for p in points))
    figure, panels = pyplot.subplots(1, len(models), figsize=(5.2 * len(models), 4.8))
    for panel, model in zip(panels, models, strict=True):
        own = [p for p in points if p.model == model]
        conditions = list(dict.fromkeys(p.condition for p in own))
        values = [s for p in own for s in (p.published_s, p.predicted_s)]
        ends = (min(values) / 1.4, max(values) * 1.4)
        panel.plot(ends, ends, color="#999999", linewidth=1)
        panel.fill_between(
            ends, [e / 1.25 for e in ends], [e * 1.25 for e in ends], color="#dddddd", alpha=0.5
        )
        for condition, colour in zip(conditions, _CONDITION_COLOURS, strict=False):
            for p in [p for p in own if p.condition == condition]:
                look = {**style(p.algorithm), "linestyle": "none", "color": colour}
                panel.plot([p.published_s], [p.predicted_s], markersize=8, **look)
                if p.is_fitted:
                    panel.plot([p.published_s], [p.predicted_s], "o", markersize=14, mfc="none", mec=colour)
            panel.plot([], [], "o", color=colour, label=condition)
        for algorithm in dict.fromkeys(p.algorithm for p in own):
            look = {**style(algorithm), "linestyle": "none", "color": "#444444"}
            panel.plot([], [], label=algorithm, **look)
        for set_scale, set_ticks, limits in (
            (panel.set_xscale, panel.set_xticks, panel.set_xlim),
            (panel.set_yscale, panel.set_yticks, panel.set_ylim),
        ):
            set_scale("log")
            set_ticks(*round_ticks(values, around=1.4))
            limits(*ends)
        panel.minorticks_off()
        panel.set_xlabel("published step, s")
        panel.set_title(model, fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("predicted step, s")
    figure.tight_layout()
    return figure


def _whole(gains: Sequence[Gain], pyplot: Any) -> Any:
    figure, panel = pyplot.subplots(figsize=(7.2, 3.6))
    for row, gain in enumerate(gains):
        panel.plot([gain.over_fp16, gain.over_ddp], [row, row], color="#bbbbbb", linewidth=3, zorder=1)
        for value, colour in ((gain.over_fp16, "#56b4e9"), (gain.over_ddp, "#111111")):
            panel.plot([value], [row], "o", color=colour, zorder=2)
    panel.axvline(PUBLISHED_GAIN, color="#d55e00", linestyle="--", label=f"published: up to {PUBLISHED_GAIN}")
    panel.plot([], [], "o", color="#56b4e9", label="predicted, over 16-bit allreduce")
    panel.plot([], [], "o", color="#111111", label="predicted, over DDP")
    names = [f"{gain.model}, {gain.algorithm}, {gain.gbit} Gbit/s" for gain in gains]
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(left=1)
    panel.set_xlabel("times the speed")
    panel.grid(alpha=0.3, axis="x")
    panel.legend(fontsize=8)
    figure.tight_layout()
    return figure
