"""Runs a calibration: measures steps on lab hosts or reads a kept result, fits, and reports predictions beside them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from benchmarks import result_file
from benchmarks.plots import round_ticks, style
from benchmarks.scaling.lab import observations
from benchmarks.scaling.lab.calibration import WITHIN, Comparison, Fitted, compare, cores_here, fit
from benchmarks.scaling.lab.observations import ALGORITHMS, FIT, HELD_OUT, TINY, Observation, is_at_most_1gbit
from benchmarks.worker_environment import worker_environment_here
from tests.lab import namespaces

_HEAD = ["setting", "algorithm", "", "measured (least to most)", "predicted", "error", "met", "processors"]


def measured_here(tiny: bool, algorithms: Sequence[str]) -> list[Observation]:
    """Of jobs on lab hosts. tiny: two hosts and few steps, for a test. Raises RunFailed."""
    # torch and the lab are not needed by the study
    from benchmarks.scaling.lab.lab_runs import Measuring
    from tests.lab.network import Lab

    settings = TINY if tiny else (*FIT, *HELD_OUT)
    hosts = max(setting.hosts for setting in settings)
    with worker_environment_here(), Lab(hosts + 1) as lab:
        measuring = Measuring(lab, 3, 0.2) if tiny else Measuring(lab)
        return measuring.observe(settings, algorithms)


def calibrate(kept: str, tiny: bool, algorithms: Sequence[str], keep: bool, about: dict[str, Any]) -> int:
    """kept: a name in observations.KEPT, whose steps count instead of new runs; empty: none. Returns the exit
    status."""
    if kept:
        observed = observations.KEPT[kept]()
    elif reason := namespaces.unavailable():
        print(f"no lab: {reason}; --calibrate-kept uses a kept result instead", file=sys.stderr)
        return 2
    else:
        observed = measured_here(tiny, algorithms or ALGORITHMS)
    cores = cores_here() if not kept else 2  # of the machine of the kept result
    fitted = fit(observed, cores)
    found = compare(fitted, observed, cores)
    words = in_words(fitted, found, kept)
    print(words)
    if keep:
        values = {
            "fitted": asdict(fitted),
            "comparisons": [{**asdict(c), "error": c.error, "is_met": c.is_met} for c in found],
            "observations": [asdict(o) for o in observed],
        }
        figures = {"predicted": partial(_plot, found)}
        part = [] if kept == "tradeoff" else ["lab"]
        for path in result_file.keep("scaling_calibration", about, words, values, part, figures):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return 0


def in_words(fitted: Fitted, found: Sequence[Comparison], kept: str) -> str:
    rows = [
        [
            str(c.setting),
            c.algorithm,
            "held out" if c.setting.held_out else "fitted",
            f"{c.measured_s:.3f} s ({c.least_s:.3f} to {c.most_s:.3f})",
            f"{c.predicted_s:.3f} s",
            f"{c.error:+.1%}",
            "yes" if c.is_met else "no",
            f"{c.busy:.0%}" if c.busy else "",
        ]
        for c in sorted(found, key=lambda c: c.setting.held_out)
    ]
    source = {
        "": "runs on lab hosts, whose workers sleep",
        "tradeoff": f"the kept result {observations.TRADEOFF.name}",
        "lab": f"the kept result {observations.LAB.name} of lab hosts, whose workers sleep",
    }[kept]
    held_out = [c for c in found if c.setting.held_out]
    slow = [c for c in held_out if is_at_most_1gbit(c.setting.rate)]
    fast = [c for c in held_out if not is_at_most_1gbit(c.setting.rate)]
    return "\n".join(
        [
            f"Steps from {source}. Costs are fitted to some settings; the others are held out.",
            "",
            result_file.table(_HEAD, rows),
            "",
            "- processors: share of their time that the workers of all hosts need, without agents and etcd; empty: not "
            "measured",
            f"- held out, up to 1 Gbit/s: {sum(c.is_met for c in slow)} of {len(slow)} within {WITHIN:.0%}",
            f"- held out, beyond: {sum(c.is_met for c in fast)} of {len(fast)} within the spread of the steps",
            "- not validated: "
            + "; ".join(f"{name}, {why}" for name, why in observations.NOT_VALIDATED.items()),
            "- fitted, of one host with a processor of its own: "
            + ", ".join(f"{name} {value:.3g}" for name, value in asdict(fitted).items()),
        ]
    )


def _plot(found: Sequence[Comparison], pyplot: Any) -> Any:
    figure, panel = pyplot.subplots(figsize=(6.4, 5.6))
    values = [s for c in found for s in (c.measured_s, c.predicted_s)]
    ends = (min(values) / 1.3, max(values) * 1.3)
    panel.plot(ends, ends, color="#999999", linewidth=1)
    band = [[e * factor for e in ends] for factor in (1 - WITHIN, 1 + WITHIN)]
    panel.fill_between(ends, *band, color="#dddddd", alpha=0.6)
    for c in found:
        look = {**style(c.algorithm), "linestyle": "none"}
        if not c.setting.held_out:
            look["markerfacecolor"] = "none"
        panel.plot([c.measured_s], [c.predicted_s], markersize=7, **look)
    for algorithm in dict.fromkeys(c.algorithm for c in found):
        panel.plot([], [], label=algorithm, **{**style(algorithm), "linestyle": "none"})
    for set_scale, set_ticks, limits in (
        (panel.set_xscale, panel.set_xticks, panel.set_xlim),
        (panel.set_yscale, panel.set_yticks, panel.set_ylim),
    ):
        set_scale("log")
        set_ticks(*round_ticks(values, around=1.3))
        limits(*ends)
    panel.minorticks_off()
    panel.set_xlabel("measured step, s (filled: held out)")
    panel.set_ylabel("predicted step, s; grey: within 10 %")
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    return figure
