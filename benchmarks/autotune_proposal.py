"""The part *propose* of benchmarks.autotune: what level 2 proposes, beside what steps take with each algorithm.

One job trains at level 2 with the algorithms allowed, until its study has measured what it proposed. A second job,
without tuning, has each algorithm pinned in turn. Its optimizer is QAdam's in both.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bagua_agent.autotune.prediction import Load, step_s
from bagua_agent.autotune.study_records import Study
from bagua_contract.step_settings import SWITCHABLE, StepSettings
from benchmarks import result_file
from benchmarks.autotune_job import NotWithin, TunedJob
from tests.lab.network import Lab

LINKS = ("100mbit", "1gbit")
MODEL = "wide"
# short trials and a short warm-up of QAdam, for a job of two minutes
OPTIONS = (
    *("--autotune-level", "2", "--autotune-algorithms", "bytegrad,qadam"),
    *("--autotune-warmup-time", "5", "--autotune-sampling-confidence-time", "3"),
)
WORKER = ("--qadam-warm-up", "10")
MEASURED_WITHIN_S = 120.0
WINDOW_S, TINY_WINDOW_S = 5.0, 2.0


@contextmanager
def _job(link: str, model: str, hosts: int, options: tuple[str, ...]) -> Iterator[TunedJob]:
    with tempfile.TemporaryDirectory(prefix="bagua-autotune-") as made:
        directory = Path(made)
        with Lab(hosts + 1, directory) as lab, TunedJob(lab, directory, model, options, WORKER) as job:
            lab.shape(link)  # before the first step, so that the network is measured as it stays
            job.start()
            yield job


def propose(link: str, model: str, hosts: int, tiny: bool) -> dict[str, Any]:
    """Raises NotWithin."""
    with _job(link, model, hosts, OPTIONS) as job:
        study = job.study_once(_has_measured, MEASURED_WITHIN_S)
        measured = job.measured()
    said = study.proposal
    if said is None or measured is None:
        raise NotWithin(f"a proposal: not within {MEASURED_WITHIN_S:g} s: {study}")
    print(f"  {said}", file=sys.stderr, flush=True)
    load = Load(said.compute_s, tuple(size for size, _ in measured.buckets), hosts, hosts)
    steps: dict[str, list[float]] = {}
    with _job(link, model, hosts, ()) as job:
        for name in (*SWITCHABLE, *reversed(SWITCHABLE)):
            job.pin(StepSettings(algorithm=name))
            steps.setdefault(name, []).append(1.0 / job.rate(TINY_WINDOW_S if tiny else WINDOW_S))
    return {
        "proposed": said.algorithm,
        "is_worth_it": said.is_worth_it,
        "instead_of": said.instead_of,
        "instead_of_s": said.instead_of_s,
        "after_switch_s": said.measured_s,
        "bytes_per_s": said.link.bytes_per_s,
        "latency_s": said.link.latency_s,
        "compute_s": said.compute_s,
        "predicted_s": {name: step_s(name, load, said.link) for name in SWITCHABLE},
        "pinned_s": {name: statistics.fmean(found) for name, found in steps.items()},
    }


def _has_measured(study: Study) -> bool:
    return study.proposal is not None and study.proposal.measured_s > 0


def in_words(parts: Sequence[dict[str, Any]]) -> list[str]:
    """A table and a line for each of the parts."""
    if not parts:
        return []
    rows, lines = [], []
    for p in parts:
        for name, pinned_s in p["pinned_s"].items():
            predicted_s = p["predicted_s"][name]
            marks = {p["proposed"]: "proposed", p["instead_of"]: "the script's"}
            rows.append(
                [
                    p["link"], p["model"], name, marks.get(name, ""), f"{1e3 * predicted_s:.1f} ms",
                    f"{1e3 * pinned_s:.1f} ms", f"{predicted_s / pinned_s - 1:+.0%}",
                ]
            )  # fmt: skip
        fastest = min(p["pinned_s"], key=p["pinned_s"].__getitem__)
        after = (
            f"{1e3 * p['after_switch_s']:.1f} ms a step after the switch"
            if p["after_switch_s"]
            else "no switch was measured"
        )
        lines.append(
            f"- {p['link']}, {p['model']}: level 2 {'proposes' if p['is_worth_it'] else 'does not propose'} "
            f"{p['proposed']} instead of {p['instead_of']}, from {p['bytes_per_s'] / 1e6:.3g} MB/s, latency "
            f"{1e3 * p['latency_s']:.3g} ms and computation {1e3 * p['compute_s']:.3g} ms: predicted "
            f"{1e3 * p['predicted_s'][p['proposed']]:.1f} ms, {after}, {1e3 * p['instead_of_s']:.1f} ms before it; "
            f"pinned in a job without tuning, {fastest} is the fastest"
        )
    head = ["link", "model", "algorithm", "", "step, predicted", "step, pinned", "error"]
    return ["", result_file.table(head, rows), "", *lines]
