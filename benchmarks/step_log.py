"""Reads the step logs of a run while they grow, and computes times from them.

Serves Bagua's ledgers and the rivals' logs alike (one JSON line per worker and committed step). Knows nothing
of hosts and processes. Imports no torch.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """One worker's part in one step. time_s: seconds since 1970. worker: the worker that wrote the line."""

    worker: str
    time_s: float
    step: int
    world_size: int
    global_rank: int
    samples: tuple[int, ...]
    epoch: int = 0
    generation: int = 0
    given_up: bool = False

    @property
    def host(self) -> str:
        """Log files of all systems begin with their host's name."""
        return self.worker.partition("-")[0]


class StepLogs:
    """All logs of a directory, read on as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self.steps: list[Step] = []

    def read_on(self) -> list[Step]:
        """Every step read so far, new ones last."""
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as stream:
                stream.seek(self._read_bytes.get(path, 0))
                whole, _, _ = stream.read().rpartition(b"\n")  # a line may be half written
            if whole:
                self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
                self.steps += filter(None, (_step(path.stem, text) for text in whole.split(b"\n")))
        return self.steps


def _step(worker: str, text: bytes) -> Step | None:
    try:
        values = json.loads(text)
    except ValueError:
        return None  # a writer was killed within this line
    if "resumed_at_step" in values:
        return None  # a start of Bagua with checkpoints says from which it goes on
    return Step(
        worker=worker,
        time_s=values["time"],
        step=values["step"],
        world_size=values["world_size"],
        global_rank=values["global_rank"],
        samples=tuple(values["samples"]),
        epoch=values["epoch"],
        generation=values["generation"],
        given_up=values.get("kind") == "given_up",
    )


def committed(steps: Iterable[Step], world_size: int, after_s: float) -> list[Step]:
    """Committed steps by `world_size` workers after `after_s`, in the order of their times."""
    found = [s for s in steps if s.world_size == world_size and s.time_s > after_s and not s.given_up]
    return sorted(found, key=lambda s: s.time_s)


def first_together(steps: Iterable[Step], hosts: int, after_s: float) -> float | None:
    """When the first step after `after_s` was committed that used samples of all `hosts` hosts.

    A newcomer that only copied the state in a step, or gave nothing to it, does not count as in.
    """
    times: dict[tuple[int, int], dict[int, float]] = {}
    for s in committed(steps, hosts, after_s):
        if s.samples:
            of_step = times.setdefault((s.generation, s.step), {})
            of_step[s.global_rank] = min(s.time_s, of_step.get(s.global_rank, s.time_s))
    whole = [max(of_step.values()) for of_step in times.values() if len(of_step) >= hosts]
    return min(whole, default=None)


def gaps_s(steps: Iterable[Step], host: str, begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """(when it ended, how long it was) of every gap between two commits on `host` that touches the span."""
    times = sorted({s.time_s for s in steps if s.host == host and not s.given_up})
    return [
        (later, later - earlier)
        for earlier, later in pairwise(times)
        if later >= begin_s and earlier <= end_s
    ]


def usual_step_s(steps: Iterable[Step], host: str, begin_s: float, end_s: float) -> float:
    """The median gap between two commits on `host` within a quiet span; 0 without any."""
    found = [length for _, length in gaps_s(steps, host, begin_s, end_s)]
    return statistics.median(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class Account:
    """What a change of membership cost. steps_undone: committed on some worker, then trained again.
    samples_again: trained, thrown away and trained again. samples_lost: drawn, in no step that counts.
    samples_twice: in two steps that count, within one epoch."""

    steps_undone: int
    samples_again: int
    samples_lost: int
    samples_twice: int


def account(steps: Sequence[Step], global_batch: int | None) -> Account:
    """global_batch: samples of every step if the system promises a fixed one; else only logged losses."""
    lines = [s for s in steps if not s.given_up]
    # of one step the newest generation counts: earlier ones were rolled back to a checkpoint
    newest: dict[int, int] = {}
    for s in lines:
        newest[s.step] = max(newest.get(s.step, 0), s.generation)
    undone = {s.step for s in lines if s.generation < newest[s.step]}
    parts: dict[tuple[int, int, tuple[int, ...]], Step] = {}
    for s in lines:
        parts.setdefault((s.generation, s.step, s.samples), s)
    again = sum(len(p.samples) for p in parts.values() if p.generation < newest[p.step])
    kept = [p for p in parts.values() if p.generation == newest[p.step]]
    used = Counter((p.epoch, sample) for p in kept for sample in p.samples)
    lost = {sample for s in steps if s.given_up for sample in s.samples} - {sample for _, sample in used}
    lost_count = len(lost)
    if global_batch is not None and kept:
        # the newest step's lines may not all be written yet
        last = max(p.step for p in kept)
        whole = {(p.step, p.samples) for p in kept if p.step < last}
        lost_count += global_batch * (last - 1) - sum(len(samples) for _, samples in whole)
    return Account(len(undone), again, lost_count, sum(n - 1 for n in used.values()))
