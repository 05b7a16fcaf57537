"""One seed from its features and history to a verdict. Runs in a process of its own, forked from a warm one."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from tests.differential import compare
from tests.differential.features import Features
from tests.differential.history import CHECKPOINT_EVERY, Event, History
from tests.differential.job import EndedRun, Job
from tests.differential.worker import Part, log_file, prepare, state_file
from tests.lab import ledger

PLAIN_LIMIT_S = 30.0
LOG_TAIL_BYTES = 6000


@dataclass(frozen=True, slots=True)
class SeedVerdict:
    """problems: empty if the job gave what the plain process gave. difference: the largest one from it."""

    seed: int
    features: tuple[str, ...]
    history: str
    problems: tuple[str, ...]
    difference: float
    duration_s: float
    logs: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(text: bytes) -> SeedVerdict:
        values = json.loads(text)
        return SeedVerdict(
            **{**values, "features": tuple(values["features"]), "problems": tuple(values["problems"])}
        )

    @property
    def line(self) -> str:
        verdict = "ok" if not self.problems else "FAILED " + "; ".join(self.problems[:3])
        what = " ".join(self.features) or "plain"
        parts = (
            f"{self.seed:6d}  {what}",
            self.history,
            verdict,
            f"{self.difference:.1e}  {self.duration_s:.2f} s",
        )
        return "  |  ".join(parts)


def judge(f: Features, history: History) -> SeedVerdict:
    """Call it once in a process, before that has any thread."""
    began_s = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="bagua-diff-"))
    try:
        problems, difference = _Comparison(f, history, directory).made()
        logs = _logs(directory) if problems else ""
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    lasted_s = time.monotonic() - began_s
    return SeedVerdict(f.seed, f.names, str(history), tuple(problems), difference, lasted_s, logs)


class _Comparison:
    def __init__(self, f: Features, history: History, directory: Path) -> None:
        self.f, self.history, self.directory = f, history, directory
        # All processes are forked here, before there is any thread.
        self.jobs = [
            Job(name, directory, f, h, with_checkpoints=bool(history.resumed_by))
            for name, h in _runs(history)
        ]
        shares = self.jobs[-1].ledger_directory if f.looks_at_share else None
        self.plain = prepare(Part("plain", 0, f, (), None, directory, shares))
        self.reference = Job("r", directory, f, History(2)) if f.dtype == "bfloat16" else None

    def made(self) -> tuple[list[str], float]:
        """What is wrong, and the largest difference from the plain process."""
        problems: list[str] = []
        for number, job in enumerate(self.jobs):
            ended = job.run()
            if ended.failure:
                return [ended.failure + self._last_words(ended)], float("inf")
            problems += _missed(job, ended)
            if number + 1 < len(self.jobs):
                continue
            self.plain.open_gate()  # after the job, whose shares it may repeat
            _, status = os.waitpid(self.plain.pid, 0)
            if status:
                return [f"the plain process ended with {os.waitstatus_to_exitcode(status)}"], float("inf")
            plain = torch.load(state_file(self.directory, "plain"))
            states = {w: torch.load(state_file(self.directory, w))["state"] for w in _left_over(job, ended)}
            tolerance = self._tolerance(plain["state"])
            problems += compare.between_workers(states)
            first = next(iter(states.values()))
            if self.f.norm == "batch" and self.history.changes_rank_0:
                first, plain["state"] = map(compare.without_running_statistics, (first, plain["state"]))
            problems += compare.against_plain(first, plain["state"], tolerance)
            problems += self._not_resumed(job)
            problems += compare.ledger_against_plain(job.ledger_directory, self.f, plain["samples"])
            return problems, compare.largest_difference(first, plain["state"])
        raise AssertionError("a history has at least one run")

    def _not_resumed(self, job: Job) -> list[str]:
        if not self.history.settled:
            return []
        resumed_at = [r.resumed_at_step for r in ledger.read(job.ledger_directory).resumptions]
        newest = self.history.resume_at // CHECKPOINT_EVERY * CHECKPOINT_EVERY
        return [] if newest in resumed_at else [f"went on from steps {resumed_at} instead of {newest}"]

    def _last_words(self, ended: EndedRun) -> str:
        """The last line of each worker that failed: of a traceback, the exception."""
        failed = [w for w, status in ended.statuses.items() if status not in (0, -9)]
        lines = {w: log_file(self.directory, w).read_text(errors="replace").split("\n") for w in failed}
        return "".join(f"; {w}: {next((x for x in reversed(said) if x), '')}" for w, said in lines.items())

    def _tolerance(self, plain: compare.State) -> float:
        if self.reference is None:
            return compare.LBFGS_TOLERANCE if self.f.has_closure else compare.TOLERANCES[self.f.dtype]
        ended = self.reference.run()
        assert not ended.failure, ended.failure
        scale = compare.largest_difference(torch.load(state_file(self.directory, "r0"))["state"], plain)
        return max(compare.BFLOAT16_LEAST[self.f.optimizer], compare.BFLOAT16_FACTOR * scale)


def _runs(history: History) -> list[tuple[str, History]]:
    """The jobs of a history: two if it goes on from a checkpoint."""
    if not history.resumed_by:
        return [("w", history)]
    # In the script, after it has waited for its checkpoints; or wherever these are by then.
    point = "step" if history.settled else "step.begin"
    lost = {e.worker for e in history.events}  # nothing else happens before
    left = (w for w in range(history.first) if w not in lost)
    all_killed = tuple(Event("kill", w, point, history.resume_at) for w in left)
    before = replace(history, events=history.events + all_killed, later=())
    return [("a", before), ("w", History(history.resumed_by, history.later))]


def _left_over(job: Job, ended: EndedRun) -> list[str]:
    """Workers that came to the script's end."""
    return [w for w in ended.finishers if state_file(job.directory, w).exists()]


def _missed(job: Job, ended: EndedRun) -> list[str]:
    """Events that did not happen: then the run says nothing of them."""
    missed = []
    killed = {job.worker_id(e.worker) for e in job.history.events if e.kind == "kill"}
    committed = set[str]().union(*ended.entered.values())
    for event in job.history.events:
        worker_id = job.worker_id(event.worker)
        status = ended.statuses.get(worker_id)
        happened = {
            "kill": status == -9,
            # a newcomer may be killed before its first commit
            "join": worker_id in committed or worker_id in killed,
            "leave": status == 0 and not state_file(job.directory, worker_id).exists(),
        }[event.kind]
        if not happened:
            missed.append(f"did not happen: {event} (it ended with {status})")
    return missed


def _logs(directory: Path) -> str:
    parts = []
    for path in sorted(directory.glob("*.log")):
        tail = path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        parts.append(f"--- {path.stem}\n{tail}")
    return "\n".join(parts)
