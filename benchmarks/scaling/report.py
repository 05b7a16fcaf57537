"""Puts the study into words: tables of throughput, efficiency, goodput and pauses, and published beside predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import result_file
from benchmarks.scaling.end_to_end import PUBLISHED_GAIN, Gain
from benchmarks.scaling.life.history import Account
from benchmarks.scaling.presets import TCP_BYTES_PER_S
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
    rates: Mapping[str, float],
    whole: Sequence[Gain],
    slow: Sequence[tuple[str, float, float]],
    votes: Sequence[tuple[str, float, float]],
) -> str:
    return "\n\n".join(
        [
            "Simulated: no such cluster was measured. [docs/scaling.md](../../docs/scaling.md) has the assumptions.",
            "## Steps and efficiency\n\nOne step in s, and throughput over nodes times that of one node.",
            _steps(points),
            f"## Goodput under failures\n\ngradient_allreduce; a node is back after {REPAIR_S:g} s. Share of the "
            "throughput without failures, missing nodes included: bagua / torchft / torchrun. Failures of one node.",
            _goodput(lives),
            f"### {_most(lives):,} nodes with a failure of each a day\n\nIn brackets without the time of missing "
            "nodes.",
            _goodput_of_most(lives),
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
            _published(published, rates),
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
    """For the kept result. Points and lives in one line each: there are about a thousand of both."""
    return {
        "points": _lines([asdict(point) for point in points]),
        "lives": _lines([_flat(asdict(life)) for life in lives]),
        "published": [asdict(point) for point in published],
        "whole trainings": [asdict(gain) for gain in whole],
    }


def _lines(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "columns": list(rows[0]),
        "rows": [",".join(_short(value) for value in row.values()) for row in rows],
    }


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """With the account's parts beside the others."""
    return {**{name: value for name, value in row.items() if name != "account"}, **row["account"]}


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
    """By model, link and nodes."""
    found = _accounts(lives)
    conditions = list(dict.fromkeys((e.rate, e.silent_share) for e in lives))
    shown = [(rate, share) for rate, share in conditions if not share or rate == "day"]
    rows = []
    for key in dict.fromkeys((e.model, e.link, e.nodes) for e in lives):
        cells = [
            " / ".join(f"{account.goodput:.3f}" for account in found[(*key, *condition)].values())
            for condition in shown
        ]
        rows.append([key[0], key[1], str(key[2]), *cells])
    head = [f"1 a {rate}" + (f", {share:.0%} silent" if share else "") for rate, share in shown]
    return result_file.table(["model", "link", "nodes", *head], rows)


def _goodput_of_most(lives: Sequence[Life]) -> str:
    """Of the largest jobs with the most failures."""
    nodes, systems = _most(lives), list(dict.fromkeys(e.system for e in lives))
    rows = []
    for (model, link, size, rate, share), own in _accounts(lives).items():
        if (size, rate) != (nodes, "day"):
            continue
        cells = [f"{own[s].goodput:.4f} ({own[s].goodput_of_present:.4f})" for s in systems]
        rows.append([model, link, f"{share:.0%}", str(own[systems[0]].losses), *cells])
    return result_file.table(["model", "link", "silent", "losses", *systems], rows)


def _accounts(lives: Sequence[Life]) -> dict[tuple[str, str, int, str, float], dict[str, Account]]:
    """By model, link, nodes, rate and silent share; then by system."""
    found: dict[tuple[str, str, int, str, float], dict[str, Account]] = {}
    for e in lives:
        found.setdefault((e.model, e.link, e.nodes, e.rate, e.silent_share), {})[e.system] = e.account
    return found


def _most(lives: Sequence[Life]) -> int:
    return max(e.nodes for e in lives)


def _changes(costs: Sequence[MembershipCost]) -> str:
    systems = list(dict.fromkeys(c.system for c in costs))
    rows = []
    for key in dict.fromkeys((c.model, c.link, c.nodes) for c in costs):
        own = {c.system: c for c in costs if (c.model, c.link, c.nodes) == key}
        cells = [f"{own[s].loss_s:.2f} s, {own[s].join_s:.2f} s" for s in systems]
        rows.append([key[0], key[1], str(key[2]), f"{own[systems[0]].copy_s:.2f} s", *cells])
    head = ["model", "link", "nodes", "copy of the state", *(f"{s}: loss, join" for s in systems)]
    return result_file.table(head, rows)


def _published(published: Sequence[PublishedPoint], rates: Mapping[str, float]) -> str:
    rows = [
        [
            p.model,
            p.condition,
            p.algorithm,
            f"{p.published_s:.3f} s",
            f"{p.predicted_s:.3f} s",
            f"{p.ratio:.2f}",
            f"{p.network_s:.3f} s",
            f"{p.without_network_s:.3f} s",
            "yes" if p.is_fitted else "",
        ]
        for p in published
    ]
    head = ["model", "network", "algorithm", "published", "predicted", "predicted / published"]
    head += ["interface busy", "predicted without network", "fitted"]
    free = [p for p in published if not p.is_fitted]
    close = sum(abs(p.ratio - 1) <= CLOSE for p in free)
    times = speedups(list(published), "BERT-Large", "1 Gbit/s")
    said = ", ".join(f"{name} {a:.1f} times published, {b:.1f} predicted" for name, (a, b) in times.items())
    fitted = ", ".join(f"{rate / 1e9:.2f} GB/s for {point}" for point, rate in rates.items())
    return "\n\n".join(
        [
            result_file.table(head, rows),
            f"- A node's rate over TCP that repeats a published step at 100 Gbit/s: {fitted}. The first three gave "
            f"the {TCP_BYTES_PER_S / 1e9:.1f} GB/s of all predictions.\n"
            f"- {close} of {len(free)} points that fitted nothing are predicted within {CLOSE:.0%}.\n"
            f"- BERT-Large at 1 Gbit/s, DDP's step over the algorithm's: {said}.",
        ]
    )


def _gains(whole: Sequence[Gain]) -> str:
    rows = [
        [g.model, g.algorithm, f"{g.gbit} Gbit/s", f"{g.over_ddp:.2f}", f"{g.over_fp16:.2f}"] for g in whole
    ]
    return result_file.table(["model", "algorithm", "network", "over DDP", "over 16 bits"], rows)
