"""Puts the study into words: tables of throughput, efficiency, goodput and pauses, and published beside predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import result_file
from benchmarks.scaling.end_to_end import PUBLISHED_GAIN, Gain
from benchmarks.scaling.published import Point as PublishedPoint
from benchmarks.scaling.published import speedups
from benchmarks.scaling.study import REPAIR_S, Life, MembershipCost, Point

_SHOWN = (8, 128, 1024)
CLOSE = 0.25
"""A prediction of a published point is called close within so much."""


def in_words(
    points: Sequence[Point],
    lives: Sequence[Life],
    costs: Sequence[MembershipCost],
    published: Sequence[PublishedPoint],
    whole: Sequence[Gain],
    slow: Sequence[tuple[str, float, float]],
    votes: Sequence[tuple[str, float, float]],
) -> str:
    return "\n\n".join(
        [
            "Simulated: no such cluster was measured. [docs/scaling.md](../../docs/scaling.md) has the assumptions.",
            "## Steps and efficiency\n\nOne step in s, and throughput over nodes times that of one node.",
            _steps(points),
            f"## Goodput under failures\n\n{lives[0].model}, {lives[0].link}, gradient_allreduce; a node is back after "
            f"{REPAIR_S:g} s. Of the throughput without failures; in brackets without the time of missing nodes.",
            _goodput(lives),
            "## A change of membership\n\nAll others pause; loss without silence; gradient_allreduce. The end of "
            "a step hides a part of the copy.",
            _changes(costs),
            "## One node that is 1.5 times slower\n\nVGG16, 25 Gbit/s, 64 nodes.",
            result_file.table(
                ["algorithm", "one step", "times a step without"],
                [[name, f"{step_s:.3f} s", f"{times:.2f}"] for name, step_s, times in slow],
            ),
            "## The vote of a step\n\nVGG16, 25 Gbit/s, 1,024 nodes of 8 workers: one step, with the vote over all "
            "workers, and if only the first worker of each node took part.",
            result_file.table(
                ["algorithm", "all workers", "first of each node"],
                [[name, f"{flat_s:.3f} s", f"{leaders_s:.3f} s"] for name, flat_s, leaders_s in votes],
            ),
            "## Published points\n\n16 nodes of 8 V100 (arXiv 2107.01499, read off figures). Fitted: the point "
            "determined a constant of the simulated cluster.",
            _published(published),
            f"## Whole trainings\n\nThe original reports a gain of up to {PUBLISHED_GAIN} over the best of DDP, "
            "Horovod and BytePS, for the best algorithm of each model. Here: its algorithm's gain for two of its "
            "models over DDP, and over an allreduce in 16 bits, which Horovod offers.",
            _gains(whole),
        ]
    )


def values(
    points: Sequence[Point],
    lives: Sequence[Life],
    published: Sequence[PublishedPoint],
    whole: Sequence[Gain],
) -> dict[str, Any]:
    """For the kept result. Points in one line each: there are over a thousand."""
    columns = list(asdict(points[0]))
    lines = [",".join(_short(value) for value in asdict(point).values()) for point in points]
    return {
        "points": {"columns": columns, "rows": lines},
        "lives": [asdict(life) for life in lives],
        "published": [asdict(point) for point in published],
        "whole trainings": [asdict(gain) for gain in whole],
    }


def _short(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _steps(points: Sequence[Point]) -> str:
    sizes = [nodes for nodes in sorted({p.nodes for p in points}) if nodes in _SHOWN] or sorted(
        {p.nodes for p in points}
    )
    rows = []
    for key in dict.fromkeys((p.model, p.link, p.algorithm) for p in points):
        own = {p.nodes: p for p in points if (p.model, p.link, p.algorithm) == key}
        cells = [f"{own[n].step_s:.3f} ({own[n].efficiency:.2f})" for n in sizes]
        rows.append([*key, *cells, f"{own[sizes[-1]].samples_per_s:,.0f}"])
    head = ["model", "link", "algorithm", *(f"{n} nodes" for n in sizes), f"samples/s at {sizes[-1]}"]
    return result_file.table(head, rows)


def _goodput(lives: Sequence[Life]) -> str:
    rows = []
    for nodes, rate, share in dict.fromkeys((e.nodes, e.rate, e.silent_share) for e in lives):
        own = {
            e.system: e.account for e in lives if (e.nodes, e.rate, e.silent_share) == (nodes, rate, share)
        }
        cells = [f"{a.goodput:.4f} ({a.goodput_of_present:.4f})" for a in own.values()]
        losses = next(iter(own.values())).losses
        rows.append([str(nodes), f"1 a {rate}", f"{share:.0%}", str(losses), *cells])
    systems = list(dict.fromkeys(e.system for e in lives))
    return result_file.table(["nodes", "failures of a node", "silent", "losses", *systems], rows)


def _changes(costs: Sequence[MembershipCost]) -> str:
    systems = list(dict.fromkeys(c.system for c in costs))
    rows = []
    for key in dict.fromkeys((c.model, c.link, c.nodes) for c in costs):
        own = {c.system: c for c in costs if (c.model, c.link, c.nodes) == key}
        cells = [f"{own[s].loss_s:.2f} s, {own[s].join_s:.2f} s" for s in systems]
        rows.append([key[0], key[1], str(key[2]), f"{own[systems[0]].copy_s:.2f} s", *cells])
    head = ["model", "link", "nodes", "copy of the state", *(f"{s}: loss, join" for s in systems)]
    return result_file.table(head, rows)


def _published(published: Sequence[PublishedPoint]) -> str:
    rows = [
        [
            p.model,
            p.condition,
            p.algorithm,
            f"{p.published_s:.3f} s",
            f"{p.predicted_s:.3f} s",
            f"{p.ratio:.2f}",
            "yes" if p.is_fitted else "",
        ]
        for p in published
    ]
    head = ["model", "network", "algorithm", "published", "predicted", "predicted / published", "fitted"]
    free = [p for p in published if not p.is_fitted]
    close = sum(abs(p.ratio - 1) <= CLOSE for p in free)
    times = speedups(list(published), "BERT-Large", "1 Gbit/s")
    said = ", ".join(f"{name} {a:.1f} times published, {b:.1f} predicted" for name, (a, b) in times.items())
    return "\n\n".join(
        [
            result_file.table(head, rows),
            f"- {close} of {len(free)} points that fitted nothing are predicted within {CLOSE:.0%}.\n"
            f"- BERT-Large at 1 Gbit/s, DDP's step over the algorithm's: {said}.",
        ]
    )


def _gains(whole: Sequence[Gain]) -> str:
    rows = [
        [g.model, g.algorithm, f"{g.gbit} Gbit/s", f"{g.over_ddp:.2f}", f"{g.over_fp16:.2f}"] for g in whole
    ]
    return result_file.table(["model", "algorithm", "network", "over DDP", "over 16 bits"], rows)
