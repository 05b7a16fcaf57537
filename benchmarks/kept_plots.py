"""Plots of results whose benchmarks measure durations or ratios: a figure of bars for each, drawn from what is kept.

    python -m benchmarks.kept_plots [RESULT.json ...]

draws those that are missing (or those named, anew) beside the results, and links them from their tables. It measures
nothing. A benchmark that keeps a result gets its plot by the same functions (result_file.keep).
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fault_rows import ROWS
from benchmarks.plots import Figure, keep_plots

COLOURS = ("#0072b2", "#999999", "#e69f00", "#009e73", "#cc3377", "#56b4e9", "#d55e00")
_OF_SYSTEM = {
    "bagua": "#0072b2",
    "torchft": "#999999",
    "torch HSDP": "#555555",
    "torchrun": "#555555",
    "torch": "#555555",
    "ddp": "#555555",
}


@dataclass(slots=True)
class Bars:
    """values: by (row, series); each a list of trials, drawn as median with the range. log: of the axis."""

    label: str
    log: bool = False
    values: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: str, series: str, *trials: float | None) -> None:
        self.values[row, series] += [trial for trial in trials if trial is not None]

    def draw(self, pyplot: Any) -> Any:
        known = {key: trials for key, trials in self.values.items() if trials}
        rows = list(dict.fromkeys(row for row, _ in known))
        series = list(dict.fromkeys(name for _, name in known))
        figure, axes = pyplot.subplots(figsize=(8, 1.0 + len(rows) * (0.18 + 0.17 * len(series))))
        height = 0.84 / len(series)
        largest = max(max(trials) for trials in known.values())
        least = min(min(trials) for trials in known.values())
        for place, name in enumerate(series):
            colour = _OF_SYSTEM.get(name, COLOURS[place % len(COLOURS)])
            for index, row in enumerate(rows):
                trials = known.get((row, name))
                if trials is None:
                    continue
                middle = statistics.median(trials)
                y = index + (place - (len(series) - 1) / 2) * height
                axes.barh(y, middle, height * 0.88, color=colour)
                if len(trials) > 1:
                    axes.plot([min(trials), max(trials)], [y, y], color="#222222", linewidth=0.9)
                axes.text(
                    max(trials),
                    y,
                    f"  {middle:,.0f}" if middle >= 1000 else f"  {middle:.3g}",
                    va="center",
                    fontsize=7,
                    color="#222222",
                )
            axes.barh([0], [0], color=colour, label=name)
        if self.log:
            axes.set_xscale("log")
            axes.set_xlim(least / 2, largest * 3)
        else:
            axes.set_xlim(0, largest * 1.14)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(self.label + (", log scale" if self.log else ""), fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        if len(series) > 1:
            axes.legend(fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
        return figure


def faults(values: Any) -> dict[str, Bars]:
    titles = {row.name: row.title for row in ROWS}
    times = Bars("seconds, of each row as the table says (median, range)", log=True)
    for trial in values["trials"]:
        for measured in trial["measured"]:
            if measured.get("of_leader"):
                continue  # no other system has a leader: the table has these, beside the same fault elsewhere
            row = titles.get(measured["row"], measured["row"].replace("_", " "))
            times.add(row, trial["system"], measured["value_s"])
    for trial in values["stock"]:
        times.add("stock script: host killed", trial["system"], trial.get("kill_s"))
        times.add("stock script: host joins", trial["system"], trial.get("join_s"))
    return {"times": times}


def chaos(values: Any) -> dict[str, Bars]:
    times = Bars("seconds, median of all events of the kind", log=True)
    by_kind: dict[tuple[str, str], list[float]] = defaultdict(list)
    for cost in values["costs"]:
        for series, name in (("recovery", "recovery_s"), ("longest pause", "pause_s")):
            if cost[name]:
                by_kind[cost["kind"], series].append(cost[name])
    for (kind, series), found in sorted(by_kind.items()):
        times.add(kind, series, statistics.median(found))
    return {"costs": times}


def cluster_scale(values: Any) -> dict[str, Bars]:
    times = Bars("milliseconds of one scheduling decision (median, range)", log=True)
    for measured in values["measured"]:
        times.add(measured["what"], "decision", *(1e3 * s for s in measured["decisions_s"]))
    return {"decisions": times}


def submit_start(values: Any) -> dict[str, Bars]:
    times = Bars("seconds from the command to the first step (median, range)")
    times.add("foreground", "first step", *values["foreground_s"])
    times.add("submitted to daemons", "first step", *values["submitted_s"])
    return {"start": times}


def newcomer(values: Any) -> dict[str, Bars]:
    times = Bars("seconds since the start of git clone")
    for milestone in values:
        times.add(milestone["what"], "reached", milestone["at_s"])
    return {"times": times}


def examples(values: Any) -> dict[str, Bars]:
    times = Bars("seconds from the command to its end")
    for taken in values:
        times.add(taken["example"], "an example", taken["seconds"])
    return {"times": times}


def scale_effect(values: Any) -> dict[str, Bars]:
    times = Bars("seconds (median, range)")
    for row, name in (("job started", "started_s"), ("scaled up", "up_s"), ("scaled down", "down_s")):
        times.add(row, "time", *values[name])
    return {"times": times}


def steps(values: Any) -> dict[str, Bars]:
    times = Bars("milliseconds of a step (median)", log=True)
    for row in values["allreduce"]:
        what = f"{row['model']}, {row['rate']}, {row['hosts']} hosts"
        times.add(what, "bagua", 1e3 * statistics.median(row["bagua_s"]))
        times.add(what, "ddp", 1e3 * statistics.median(row["ddp_s"]))
    return {"steps": times}


def kernels(values: Any) -> dict[str, Bars]:
    shares = Bars("time of the kernel over that of a copy of its bytes (medians)")
    for row in values:
        share = statistics.median(row["seconds"]) / statistics.median(row["memcpy_s"])
        shares.add(row["kernel"], row["dtype"], share)
    return {"share": shares}


def load_balancing(values: Any) -> dict[str, Bars]:
    found = Bars("words per second over those of plain DDP (medians)")
    by_case: dict[tuple[str, str], list[float]] = defaultdict(list)
    for trial in values.get("trials", ()):  # a result may be of one part of the benchmark
        by_case[f"{trial['texts']}, {trial['workers']} workers", trial["system"]].append(trial["words_per_s"])
    for (case, system), speeds in by_case.items():
        if system != "ddp":
            found.add(case, system, statistics.median(speeds) / statistics.median(by_case[case, "ddp"]))
    uneven = Bars("the slowest worker's cost over the mean, less is better (mean)")
    for split in values.get("splits", ()):
        case = f"{split['texts']}, {split['workers']} workers"
        # a budget follows from the number of workers, so its number is no other way of splitting
        uneven.add(case, re.sub(r"budget \d+", "budget", split["name"]), statistics.mean(split["imbalances"]))
    return {name: bars for name, bars in (("speed", found), ("imbalance", uneven)) if bars.values}


def cached_dataset(values: Any) -> dict[str, Bars]:
    times = Bars("seconds of an epoch of reading (median, range)", log=True)
    for row in values:
        case = f"{row['kind']}, {row['num_workers']} loader workers"
        times.add(case, "nothing kept", row["nothing_kept_s"])
        for backend, rounds in row["rounds_s"].items():
            times.add(case, backend, *rounds)
    return {"epochs": times}


def fused_optimizer(values: Any) -> dict[str, Bars]:
    speeds = Bars("times as fast as the optimizer's own loop (medians), gradients kept", log=True)
    for row in values:
        if row["gradients"] != "kept" or row["model"].startswith("BERT"):
            continue
        loop = row["seconds"].get("loop")
        for way in ("foreach", "blocks", "compiled"):
            if loop and (measured := row["seconds"].get(way)):
                speeds.add(row["optimizer"], way, statistics.median(loop) / statistics.median(measured))
    return {"speed": speeds}


def uneven_workers(values: Any) -> dict[str, Bars]:
    speeds = Bars("samples per second (median, range of seeds)")
    for row in values:
        speeds.add(row["system"], "samples per second", row["samples_per_s"])
    return {"speed": speeds}


def uneven_losses(values: Any) -> dict[str, Bars]:
    losses = Bars("training loss at equal samples (median, range of seeds)")
    for row in values:
        losses.add(row["way"], "training loss", row["training"])
    return {"losses": losses}


def lost_in_round(values: Any) -> dict[str, Bars]:
    times = Bars("longest time between two local steps, in milliseconds (median, range)")
    for trial in values:
        times.add(trial["system"], "before the loss", 1e3 * trial["usual_s"])
        times.add(trial["system"], "after the loss", 1e3 * trial["pause_s"])
    return {"pause": times}


def rendezvous_churn(values: Any) -> dict[str, Bars]:
    times = Bars("seconds until all agents know the next generation (median, range)")
    for churn in values:
        for change in churn["changes"]:
            times.add(f"{churn['agents']} agents", f"after a {change['what']}", change["wall_s"])
    return {"times": times}


def sharded(values: Any) -> dict[str, Bars]:
    steps, memory = Bars("milliseconds of a step (median, range)"), Bars("MiB of a worker (median, range)")
    for block in values["blocks"]:
        system = "torch HSDP" if block["system"] == "hsdp" else block["system"]
        steps.add("step", system, 1e3 * block["step_s"])
        memory.add("grown while training", system, block["grown_bytes"] / 2**20)
        memory.add("peak", system, block["peak_bytes"] / 2**20)
    times = Bars("seconds (median, range)", log=True)
    for row, name in (
        ("host killed: next step", "next_step_s"),
        ("host joins", "join_s"),
        ("pause of the others while it joins", "pause_s"),
    ):
        for fault in values["faults"]:
            model = f"model {fault['width']} wide, {fault['blocks']} blocks" if "width" in fault else "bagua"
            times.add(row, model, fault[name])
    return {
        name: bars for name, bars in (("step", steps), ("memory", memory), ("faults", times)) if bars.values
    }


def deterministic(values: Any) -> dict[str, Bars]:
    steps = Bars("milliseconds of a step (median, range)")
    for row in values["throughput"]:
        setting = row["setting"]
        case = f"{setting['samples']} samples a shard, {setting['rate'] or 'unshaped'}"
        for series in ("normal", "deterministic"):
            steps.add(case, series, *(1e3 * s for s in row[f"{series}_s"]))
    return {"steps": steps}


def group_rebuild(values: Any) -> dict[str, Bars]:
    times = Bars("milliseconds until the first collective of the new group ends (median, range)")
    released: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for trial in values:
        case = trial["situation"], trial["system"]
        if trial["first_s"] is not None:
            times.add(*case, 1e3 * trial["first_s"])
        if trial["situation"] in ("one killed", "one silent"):
            released[case].append(trial["released_s"] is not None)
    ended = Bars("percent of the trials in which a wait in the old group ended")
    for case, trials in released.items():
        ended.add(*case, 100.0 * statistics.mean(trials))
    return {"times": times, "released": ended}


def autotune(values: Any) -> dict[str, Bars]:
    """Rates of the grid, also of what a study has kept."""
    rates = Bars("steps per second in the grid", log=True)
    grids = {(p["link"], p["model"]): p["rates"] for p in values if p["part"] == "grid"}
    kept = {(p["link"], p["model"]): p["kept"] for p in values if p["part"] == "tune"}
    for (link, model), found in grids.items():
        case = f"{link}, {model}"
        rates.add(case, "worst of the grid", min(found.values()))
        rates.add(case, "as the script says", found["as the script says"])
        rates.add(case, "kept by the study", found.get(kept.get((link, model))))
        rates.add(case, "best of the grid", max(found.values()))
    proposals = Bars("milliseconds of a step, as level 2 predicts it and as it is", log=True)
    for p in (p for p in values if p["part"] == "propose"):
        for name, pinned_s in p["pinned_s"].items():
            case = f"{p['link']}, {name}" + (", proposed" if name == p["proposed"] else "")
            proposals.add(case, "predicted", 1e3 * p["predicted_s"][name])
            proposals.add(case, "pinned", 1e3 * pinned_s)
    return {name: bars for name, bars in (("rates", rates), ("proposals", proposals)) if bars.values}


def gpu_kernels(values: Any) -> dict[str, Bars]:
    shares = Bars("bandwidth of the kernel over that of a copy (medians)")
    copies = {
        row["dtype"]: statistics.median(row["seconds"]) / row["nbytes"]
        for row in values
        if row["kernel"] == "copy"
    }
    for row in values:
        shares.add(
            row["kernel"],
            row["dtype"],
            copies[row["dtype"]] * row["nbytes"] / statistics.median(row["seconds"]),
        )
    return {"share": shares}


KINDS: dict[str, Callable[[Any], dict[str, Bars]]] = {
    function.__name__: function
    for function in (
        faults, chaos, cluster_scale, submit_start, scale_effect, steps, kernels, load_balancing, cached_dataset,
        fused_optimizer, uneven_workers, uneven_losses, lost_in_round, rendezvous_churn, sharded, deterministic,
        group_rebuild, autotune, gpu_kernels, newcomer, examples,
    )
}  # fmt: skip


def figures_of(name: str, values: Any) -> dict[str, Figure]:
    """Of the result of benchmark `name`; none if it draws its own. values: as in the result's JSON."""
    if name not in KINDS:
        return {}
    return {figure: bars.draw for figure, bars in KINDS[name](values).items()}


def kind_of(result: Path) -> str:
    """The benchmark of a kept result; the rest of the name says which part of it was measured."""
    name = result.stem.split("-")[0]
    return next((kind for kind in KINDS if name == kind or name.startswith(f"{kind}_")), name)


def draw(result: Path) -> list[Path]:
    """Draw the plots of a kept result, and link them from its table unless they are linked there."""
    name = kind_of(result)
    table = result.with_suffix(".md")
    before = table.read_text()
    paths = keep_plots(table, figures_of(name, json.loads(result.read_text())["values"]))
    if all(f"({path.name})" in before for path in paths):
        table.write_text(before)
    return paths


def without_plot(results: Iterable[Path]) -> list[Path]:
    """Those that have no plot yet; a benchmark that KINDS does not name draws its own."""
    return [r for r in results if not list(r.parent.glob(f"{r.stem}-[a-z]*.png"))]


def missing(results: Iterable[Path]) -> list[Path]:
    """Those that have no plot yet, and could have one."""
    return [r for r in without_plot(results) if kind_of(r) in KINDS]


def main(words: Sequence[str]) -> None:
    from benchmarks.result_file import RESULTS

    for result in [Path(word) for word in words] or missing(sorted(RESULTS.glob("*.json"))):
        for path in draw(result):
            print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
