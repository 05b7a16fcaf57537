"""Compares the collectives that a job's workers have under way, and names the ranks that have not begun one. Pure.

Workers answer for themselves (bagua_core/worker/collectives_answer.py), at slightly different moments, so a collective
is named only if it has lasted for a while. What a worker answered is its word: it is checked, and bounded, before it is
compared. A collective has the same number on all members of its group; ranks that have begun fewer have not come to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bagua_agent.base.errors import PeerViolation
from bagua_agent.base.plain_text import counted, duration, plain_line, shortened, some

LEAST_LASTING_S = 1.0  # of a collective whose absent ranks are named
MOST_GROUPS = 128  # of an answer
MOST_OPERATIONS = 64  # of a group
LONGEST_NAME = 120
_MOST_RANKS = 4096
_MOST_NAMED = 16


class OddAnswer(PeerViolation):
    """The error of a worker's answer that is not what a worker of this version writes."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """An operation that is under way. number: of a collective, equal on all members of its group; 0: a message between
    two. elements: where torch does not say bytes."""

    number: int
    what: str
    size_bytes: int
    elements: int
    since_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """The part of one worker in a group of workers. ranks: of its members, global. begun: collectives so far."""

    name: str
    transport: str
    generation: int
    ranks: tuple[int, ...]
    begun: int
    under_way: tuple[UnderWay, ...]

    @property
    def key(self) -> tuple[str, str, int, tuple[int, ...]]:
        return self.name, self.transport, self.generation, self.ranks


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of gradients that is full and on its way."""

    bucket: int
    size_bytes: int
    since_s: float


@dataclass(frozen=True, slots=True)
class WorkerCollectives:
    """The answer of one worker. problem: why there is no answer. asked: False if that is why. torch_problem: why
    nothing of torch's process groups is in it."""

    rank: int | None
    place: str  # node and slot
    groups: tuple[Group, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    problem: str = ""
    torch_problem: str = ""
    asked: bool = True


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective that some ranks have begun and that is not done. without_group: ranks that answered and have no such
    group now. unknown, not_asked: ranks that did not answer, and that were not asked."""

    group: str
    transport: str
    generation: int
    number: int
    what: str
    since_s: float
    here: tuple[int, ...]
    absent: tuple[int, ...]
    without_group: tuple[int, ...]
    unknown: tuple[int, ...]
    not_asked: tuple[int, ...]


def parse(rank: int | None, place: str, answer: str) -> WorkerCollectives:
    """Reads a worker's answer. Raises OddAnswer."""
    try:
        said = json.loads(answer)
        if said.get("problem"):
            return WorkerCollectives(rank, place, problem=shortened(str(said["problem"])))
        groups = [*said["groups"][:MOST_GROUPS], *said["torch"][:MOST_GROUPS]]
        return WorkerCollectives(
            rank,
            place,
            tuple(_group(group) for group in groups),
            tuple(
                Bucket(int(b["bucket"]), int(b["bytes"]), _seconds(b["since_s"]))
                for b in said["buckets"][: MOST_GROUPS * MOST_OPERATIONS]
            ),
            torch_problem=shortened(str(said["torch_problem"])),
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise OddAnswer(f"its answer can't be read ({type(error).__name__})") from error


def _group(said: Mapping[str, Any]) -> Group:
    return Group(
        shortened(str(said["name"]), LONGEST_NAME),
        shortened(str(said["transport"]), LONGEST_NAME),
        int(said["generation"]),
        tuple(int(rank) for rank in said["ranks"][:_MOST_RANKS]),
        int(said["begun"]),
        tuple(
            UnderWay(
                int(u["number"]),
                shortened(str(u["what"]), LONGEST_NAME),
                int(u["bytes"]),
                int(u.get("elements", 0)),
                _seconds(u["since_s"]),
            )
            for u in said["under_way"][:MOST_OPERATIONS]
        ),
    )


def _seconds(said: Any) -> float:
    seconds = float(said)
    if not math.isfinite(seconds):
        raise ValueError("no time")
    return max(0.0, seconds)


def waiting(workers: Sequence[WorkerCollectives]) -> tuple[Waiting, ...]:
    """Returns the oldest collective of each group that has lasted, the longest wait first."""
    left_out = {worker.rank for worker in workers if worker.rank is not None and not worker.asked}
    answered = {worker.rank for worker in workers if worker.rank is not None and not worker.problem}
    # torch records a group with its first collective
    knows_torch = {worker.rank for worker in workers if worker.rank in answered and not worker.torch_problem}
    by_group: dict[tuple[str, str, int, tuple[int, ...]], dict[int, Group]] = {}
    for worker in workers:
        for group in worker.groups:
            if worker.rank is not None:
                by_group.setdefault(group.key, {})[worker.rank] = group
    found = []
    for (name, transport, generation, ranks), parts in by_group.items():
        numbered = [u for part in parts.values() for u in part.under_way if u.number > 0]
        if not numbered:
            continue
        number = min(u.number for u in numbered)
        here = {rank: u for rank, part in parts.items() for u in part.under_way if u.number == number}
        longest = max(here.values(), key=lambda u: u.since_s)
        if longest.since_s < LEAST_LASTING_S:
            continue
        others = set(ranks) - parts.keys()
        not_begun = {rank for rank, part in parts.items() if part.begun < number}
        if not generation:
            not_begun |= others & knows_torch
        found.append(
            Waiting(
                name,
                transport,
                generation,
                number,
                longest.what,
                longest.since_s,
                tuple(sorted(here)),
                tuple(sorted(not_begun)),
                tuple(sorted((others & answered) - not_begun)),
                tuple(sorted(others - answered - left_out)),
                tuple(sorted(left_out.intersection(ranks))),
            )
        )
    return tuple(sorted(found, key=lambda w: -w.since_s))


def text_of(workers: Sequence[WorkerCollectives], first: int | None = None) -> str:
    """Returns the text that a person reads: first what the ranks wait in, then each worker. first: the rank that comes
    first."""
    lines = [_sentence(each) for each in waiting(workers)]
    if not lines:
        lines = [f"No collective has been under way for {LEAST_LASTING_S:g} s."]
    for worker in sorted(workers, key=lambda w: (w.rank != first, w.rank is None, w.rank or 0, w.place)):
        rank = "no rank" if worker.rank is None else f"rank {worker.rank}"
        lines += ["", f"{rank}, {worker.place}"]
        lines += _lines_of(worker)
    return "".join(plain_line(line) + "\n" for line in lines)


def as_json(workers: Sequence[WorkerCollectives]) -> dict[str, Any]:
    return {
        "waiting": [asdict(each) for each in waiting(workers)],
        "workers": [asdict(worker) for worker in workers],
    }


def _sentence(each: Waiting) -> str:
    ranks = _ranks(each.here)
    verb = "waits" if len(each.here) == 1 else "wait"
    said = f"{ranks} {verb} in {_title(each.what, each.number, each.group, each.transport, each.generation)}"
    said += f", for {duration(each.since_s)}"
    if each.absent:
        said += f"; {_ranks(each.absent)} {'has' if len(each.absent) == 1 else 'have'} not begun it"
    if each.without_group:
        said += f"; {_ranks(each.without_group)} answered without such a group"
    if each.unknown:
        said += f"; {_ranks(each.unknown)} did not answer"
    if each.not_asked:
        said += f"; {_ranks(each.not_asked)} {'was' if len(each.not_asked) == 1 else 'were'} not asked"
    if not (each.absent or each.without_group or each.unknown or each.not_asked):
        said += "; all ranks have begun it, so the network or a device is what it waits for"
    return said + "."


def _title(what: str, number: int, group: str, transport: str, generation: int) -> str:
    of = f"generation {generation}, {group}" if generation else f"torch's group {group}"
    return f"{what} number {number} ({of}, {transport})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'Rank' if len(ranks) == 1 else 'Ranks'} {some(map(str, ranks), _MOST_NAMED)}"


def _lines_of(worker: WorkerCollectives) -> list[str]:
    if worker.problem:
        return [f"  no answer: {worker.problem}"]
    lines = []
    for group in worker.groups:
        of = (
            f"generation {group.generation}, {group.name}"
            if group.generation
            else f"torch's group {group.name}"
        )
        among = f"among ranks {some(map(str, group.ranks), _MOST_NAMED)}"
        lines.append(f"  {of} ({group.transport}) {among}: {counted(group.begun, 'collective')} begun")
        lines += [
            f"    {u.what}{f' number {u.number}' if u.number else ''}, {_size(u)}, for {duration(u.since_s)}"
            for u in group.under_way
        ]
    lines += [
        f"  bucket {b.bucket} of gradients, {b.size_bytes:,} bytes, for {duration(b.since_s)}"
        for b in worker.buckets
    ]
    if not any(group.under_way for group in worker.groups) and not worker.buckets:
        lines.append("  nothing is under way")
    return lines


def _size(operation: UnderWay) -> str:
    return f"{operation.elements:,} elements" if operation.elements else f"{operation.size_bytes:,} bytes"
