"""Compares what autotuning settles on with an exhaustive grid: four lab hosts, links of three speeds, and a drop.

    python -m benchmarks.autotune --part grid --part tune --link 1gbit --model wide    # minutes; parts can run apart
    python -m benchmarks.autotune --part drop                # 1 Gbit/s that becomes 100 Mbit/s in mid-run
    python -m benchmarks.autotune --part grid --part tune --part drop --model deep_16kib   # wrong own buckets
    python -m benchmarks.autotune --part propose             # what level 2 proposes: 100 Mbit/s and 1 Gbit/s, 7 minutes
    python -m benchmarks.autotune --part report --keep       # a table: the kept parts, and those that ran since
    python -m benchmarks.autotune --part grid --part tune --part drop --part report --tiny   # two hosts: does it work?

Each part writes <out>/<part>-<link>-<model>.json. One link and model take 4 minutes for grid, 14 at most for tune and
for drop. A grid pins each choice in one running job and measures its steps. The settings that a study keeps are
compared by their rates in the grid, so run both on one machine. Needs root (network namespaces) and an otherwise idle
machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua_agent.autotune.space import Facts, space_of
from bagua_agent.autotune.study_records import BUDGET, Phase
from bagua_agent.base.plain_text import counted
from bagua_contract.step_settings import StepSettings
from benchmarks import autotune_proposal, result_file
from benchmarks.autotune_job import MODELS, NotWithin, TunedJob
from tests.lab import namespaces
from tests.lab.network import Lab

LINKS = ("100mbit", "1gbit", "10gbit")
DROP = ("1gbit", "100mbit")
HOSTS, TINY_HOSTS = 4, 2
# then the best so far counts, so a part is over in 14 minutes
SETTLES_WITHIN_S, TINY_SETTLES_WITHIN_S = 660.0, 240.0
OF_BEST, OVER_SCRIPT, AFTER_DROP, DROP_WITHIN_S = 0.95, 1.08, 0.90, 60.0
TINY = (
    "--autotune-max-samples",
    "3",
    "--autotune-warmup-time",
    "2",
    "--autotune-sampling-confidence-time",
    "2",
)
WINDOW_S, TINY_WINDOW_S = 5.0, 2.0
KEPT = "autotune"  # name of the result
PARTS = ("grid", "tune", "drop", "propose", "report")

Part = dict[str, Any]
"""What one part has measured, with its link, model and circumstances."""


def grid(job: TunedJob, tiny: bool) -> Part:
    """Rates of all settings that a study of this job could try, but for the order of tensors.

    Each is measured twice, the second time in the opposite order, and has the mean: other work on the machine comes and
    goes.
    """
    space = space_of(Facts(gradient_bytes=MODELS[job.model].gradient_bytes, crosses=False))
    points = list(space.first_points())[:3] if tiny else list(space.points())
    found: dict[str, list[float]] = {}
    for settings in map(space.settings_at, (*points, *reversed(points))):
        job.pin(settings)
        rate = job.rate(TINY_WINDOW_S if tiny else WINDOW_S)
        found.setdefault(str(settings), []).append(rate)
        print(f"  {settings}: {rate:.3g} steps/s", file=sys.stderr, flush=True)
    return {"rates": {settings: statistics.fmean(rates) for settings, rates in found.items()}}


def tune(job: TunedJob, tiny: bool) -> Part:
    study = job.settled_or_last(TINY_SETTLES_WITHIN_S if tiny else SETTLES_WITHIN_S)
    best = StepSettings() if study.best is None else study.best.settings
    trials = [{"settings": _unordered(t.settings), "rate": t.rate, "at_s": t.ended_s} for t in study.trials]
    return {
        "kept": _unordered(best),
        "settled": study.phase is Phase.SETTLED,
        "trials": trials,
        "lost_share": study.lost_s / study.trained_s if study.trained_s else 0.0,
    }


def drop(job: TunedJob, lab: Lab, tiny: bool) -> Part:
    """Rates by the second after the link's bandwidth has dropped, and the settings in force.

    Where the script's own buckets are wrong, the link drops while they are in force, before the first trial: what a
    study settles on before the drop is good after it too. Else it drops once the study has settled.
    """
    if MODELS[job.model].bucket_bytes is None:
        before = job.settled_or_last(TINY_SETTLES_WITHIN_S if tiny else SETTLES_WITHIN_S)
    else:
        before = job.study()
    lab.shape(DROP[1])
    dropped_s, seen = time.monotonic(), []
    while time.monotonic() - dropped_s < (DROP_WITHIN_S / 4 if tiny else 2 * DROP_WITHIN_S):
        rate, current = job.rate(TINY_WINDOW_S), job.study().current
        seen.append({"after_s": time.monotonic() - dropped_s, "rate": rate, "settings": _unordered(current)})
    after = job.study()
    return {
        "trials_before": len(before.trials),
        "settled_before": before.phase is Phase.SETTLED,
        "studies": after.number - before.number,
        "settled": after.phase is Phase.SETTLED,
        "seen": seen,
    }


def _unordered(settings: StepSettings) -> str:
    return str(StepSettings(settings.bucket_bytes, settings.hierarchical, settings.algorithm))


def _measured(part: str, job: TunedJob, lab: Lab, tiny: bool) -> Part:
    if part == "drop":
        return drop(job, lab, tiny)
    return grid(job, tiny) if part == "grid" else tune(job, tiny)


def run_part(part: str, link: str, model: str, tiny: bool) -> Part:
    about = result_file.circumstances()
    if part == "propose":
        found = autotune_proposal.propose(link, model, TINY_HOSTS if tiny else HOSTS, tiny)
        return {"part": part, "link": link, "model": model, "tiny": tiny, **found, "about": about}
    options = () if part == "grid" else ("--autotune-level", "1", *(TINY if tiny else ()))
    with tempfile.TemporaryDirectory(prefix="bagua-autotune-") as made:
        hosts = TINY_HOSTS if tiny else HOSTS
        with Lab(hosts + 1, Path(made)) as lab, TunedJob(lab, Path(made), model, options) as job:
            job.start()
            lab.shape(link)
            found = _measured(part, job, lab, tiny)
    return {"part": part, "link": link, "model": model, "tiny": tiny, **found, "about": about}


def merged(kept: Sequence[Part], new: Sequence[Part]) -> list[Part]:
    """A part that has run again takes the place of the kept one; all others stay."""
    found = {(p["part"], p["link"], p["model"]): p for p in (*kept, *new)}
    return [found[place] for place in sorted(found)]


def is_met(kept: float, best: float, scripted: float, lost_share: float) -> bool:
    """Rates in the grid. Where the script's settings leave at least so much to gain, it must be gained."""
    at_least = OVER_SCRIPT if OF_BEST * best >= OVER_SCRIPT * scripted else 1.0
    return kept >= OF_BEST * best and kept >= at_least * scripted and lost_share <= BUDGET


def in_words(parts: Sequence[Part]) -> str:
    """The table, and what a run without a grid of the same link and model leaves out."""
    grids = {(p["link"], p["model"]): p["rates"] for p in parts if p["part"] == "grid"}
    rows, notes = [], []
    for p in (p for p in parts if p["part"] == "tune"):
        rates = grids.get((p["link"], p["model"]))
        if rates is None or p["kept"] not in rates:
            notes.append(f"- {p['link']}, {p['model']}: no grid has {p['kept']}")
            continue
        best, kept, scripted = max(rates.values()), rates[p["kept"]], rates[str(StepSettings())]
        met = is_met(kept, best, scripted, p["lost_share"])
        rows.append(
            [
                p["link"], p["model"], p["kept"], str(len(p["trials"])), f"{kept / best:.1%}",
                f"{kept / scripted - 1:+.1%}", f"{best / scripted - 1:+.1%}", f"{p['lost_share']:.1%}",
                "yes" if met else "no",
            ]
        )  # fmt: skip
    for p in (p for p in parts if p["part"] == "drop"):
        where = f"- {p['link']}, {p['model']}, drop to {DROP[1]}{_when(p)}"
        rates = grids.get((DROP[1], p["model"]))
        if rates is None:
            notes.append(f"{where}: there is no grid of {DROP[1]} to compare with")
            continue
        best = max(rates.values())
        within = next((s["after_s"] for s in p["seen"] if s["rate"] >= AFTER_DROP * best), None)
        said = "never" if within is None else f"after {within:.0f} s"
        notes.append(f"{where}: {AFTER_DROP:.0%} of the new best {said}")
    notes += [
        f"- {p['part']}, {p['link']}, {p['model']}: {p['about']['date']}, commit {p['about']['commit']}, load at the "
        f"start {p['about']['load_at_start']:.1f}{'' if p.get('settled', True) else '; not settled in time'}"
        for p in parts
    ]
    head = [
        "link",
        "model",
        "kept",
        "trials",
        "of the best",
        "over the script's",
        "best over the script's",
        "lost",
        "met",
    ]
    proposals = autotune_proposal.in_words([p for p in parts if p["part"] == "propose"])
    return "\n".join([result_file.table(head, rows), *proposals, "", *notes])


def _when(p: Part) -> str:
    """The state of the study when the link dropped; empty for parts that were kept without it."""
    if p.get("trials_before") == 0:
        return " before the first trial"
    if "settled_before" not in p:
        return ""
    if p["settled_before"]:
        return " once the study had settled"
    return f" after {counted(p['trials_before'], 'trial')}, before the study had settled"


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--part", choices=PARTS, action="append", required=True)
    parser.add_argument("--link", choices=LINKS, action="append", help="may come again; default: all")
    parser.add_argument("--model", choices=tuple(MODELS), action="append", help="likewise")
    parser.add_argument(
        "--out", type=Path, help="folder of the parts; default: autotune-parts, -tiny with --tiny"
    )
    parser.add_argument("--tiny", action="store_true", help="two hosts and few settings, as a test")
    parser.add_argument("--keep", action="store_true", help="write the report to benchmarks/results")
    args = parser.parse_args(arguments)
    if args.tiny and args.keep:
        parser.error("--tiny measures too little for a result; leave --keep out")
    if reason := namespaces.unavailable():
        print(f"no lab: {reason}", file=sys.stderr)
        return 2
    about = result_file.circumstances()
    out = args.out or Path("autotune-parts-tiny" if args.tiny else "autotune-parts")
    out.mkdir(parents=True, exist_ok=True)
    failed = False
    for part in (p for p in args.part if p != "report"):
        links, models = args.link or LINKS, args.model or tuple(MODELS)
        if part == "propose":
            links, models = args.link or autotune_proposal.LINKS, args.model or (autotune_proposal.MODEL,)
        if args.tiny:
            links, models = args.link or LINKS[1:2], models[:1]
        for link in (DROP[0],) if part == "drop" else links:
            for model in models:
                print(f"{part}, {link}, {model}", file=sys.stderr, flush=True)
                try:
                    found = run_part(part, link, model, args.tiny)
                except NotWithin as error:
                    print(f"{part}, {link}, {model} has no result: {error}", file=sys.stderr, flush=True)
                    failed = True
                else:
                    (out / f"{part}-{link}-{model}.json").write_text(json.dumps(found, indent=1))
    kept = [] if args.tiny else result_file.newest(KEPT) or []
    parts = merged(kept, [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))])
    words = in_words(parts)
    print(words)
    if args.keep and "report" in args.part:
        for path in result_file.keep(KEPT, about, words, parts):
            print(f"wrote {path.relative_to(result_file.ROOT)}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
