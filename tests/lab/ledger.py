"""Reads a job's ledger, and checks that it is one complete history: every sample of an epoch exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

from bagua_core.elastic.ledger.ledger import SUFFIX, LedgerLine, Resumption

_MOST_VIOLATIONS = 100
_When = tuple[tuple[int, float], int, str]  # the start before it, its generation, its job
_BEFORE_ALL = (0, 0.0)  # lines of a job without a resumption


def decode_line(text: bytes) -> LedgerLine:
    """Raises ValueError for anything but one whole line."""
    kept = {"job": "", **_values(text, LedgerLine, "a ledger line")}
    samples = kept["samples"]
    if not isinstance(samples, list) or not all(map(_is_whole, samples)) or kept["world_size"] < 1:
        raise ValueError(f"not a ledger line: {text[:80]!r}")
    kept["samples"] = tuple(samples)
    return LedgerLine(**kept)


def is_resumption(text: bytes) -> bool:
    """Whether a line of a ledger is of this kind, if it can be read."""
    return b'"resumed_at_step"' in text


def decode_resumption(text: bytes) -> Resumption:
    """Raises ValueError for anything but one whole line of this kind."""
    kept = _values(text, Resumption, "a resumption")
    if "job" not in kept:
        raise ValueError(f"not a resumption: {text[:80]!r}")
    return Resumption(**kept)


def _values(text: bytes, kind: type[LedgerLine | Resumption], what: str) -> dict[str, Any]:
    """The fields of `kind`; `job` may be missing. Raises ValueError for anything but numbers and a name."""
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"not {what}: {text[:80]!r}") from error
    names = {f.name for f in fields(kind)}
    if not isinstance(values, dict) or not names - {"job"} <= values.keys():
        raise ValueError(f"not {what}: {text[:80]!r}")
    kept = {name: values[name] for name in names & values.keys()}
    numbers = [kept[name] for name in kept.keys() - {"time", "samples", "job"}]
    is_named = isinstance(kept.get("job", ""), str)
    if not is_named or type(kept["time"]) not in (int, float) or not all(map(_is_whole, numbers)):
        raise ValueError(f"not {what}: {text[:80]!r}")
    return kept


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 1 << 63  # a bool is no number here


def _key(line: LedgerLine) -> tuple[str, int, int, int]:
    return (line.job, line.generation, line.step, line.global_rank)


def _order(resumption: Resumption) -> tuple[int, float]:
    """By time only if two starts could not know of each other."""
    return (resumption.run, resumption.time)


@dataclass(frozen=True, slots=True)
class Ledger:
    """All lines that count, deduplicated, by step, run, generation and rank.

    torn: pieces of lines that were never finished. conflicts: lines of one key that differ. resumptions: each
    start from a checkpoint once, in order. voided: lines that such a start undid.
    """

    lines: tuple[LedgerLine, ...]
    torn: int = 0
    conflicts: tuple[str, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    voided: tuple[LedgerLine, ...] = ()

    @staticmethod
    def of(lines: Iterable[LedgerLine], torn: int = 0, resumptions: Iterable[Resumption] = ()) -> Ledger:
        starts = _in_order(resumptions)
        by_key: dict[tuple[str, int, int, int], LedgerLine] = {}
        conflicts = []
        for line in lines:
            known = by_key.setdefault(_key(line), line)
            if (known.world_size, known.epoch, tuple(known.samples)) != (
                line.world_size,
                line.epoch,
                tuple(line.samples),
            ):
                conflicts.append(
                    f"generation {line.generation}, step {line.step}, global rank {line.global_rank} "
                    "was written twice with different contents"
                )
        ordered = sorted(
            by_key.values(), key=lambda x: (x.step, _era(x, starts), x.generation, x.job, x.global_rank)
        )
        void = {_key(line) for line in ordered if _is_void(line, starts)}
        return Ledger(
            tuple(line for line in ordered if _key(line) not in void),
            torn,
            tuple(conflicts),
            starts,
            tuple(line for line in ordered if _key(line) in void),
        )

    @property
    def steps(self) -> int:
        """Different committed steps."""
        return len({line.step for line in self.lines})

    def check(self, dataset_length: int, epochs: int, *, samples_per_epoch: int | None = None) -> list[str]:
        """The violations, as text; empty if this is one complete history.

        epochs: how many are finished; a later one may be under way. samples_per_epoch: how many of the
        data set's samples each epoch uses (fewer than all with drop_last).
        """
        found = [*self.conflicts, *self._step_violations()]
        found += self._sample_violations(dataset_length, epochs, samples_per_epoch)
        if len(found) > _MOST_VIOLATIONS:
            found[_MOST_VIOLATIONS:] = [f"... and {len(found) - _MOST_VIOLATIONS} more"]
        return found

    def _step_violations(self) -> list[str]:
        found = []
        steps: dict[int, dict[_When, list[LedgerLine]]] = {}
        for line in self.lines:
            # Each job counts its generations anew, so only with the start before them do they have an order.
            when = (_era(line, self.resumptions), line.generation, line.job)
            steps.setdefault(line.step, {}).setdefault(when, []).append(line)
        previous: tuple[int, _When] | None = None
        for step, generations in steps.items():
            if len(generations) > 1:
                found.append(
                    f"step {step} was committed in generations {sorted(number for _, number, _ in generations)}"
                )
            for (_, generation, _), lines in generations.items():
                sizes = {line.world_size for line in lines}
                if len(sizes) > 1:
                    found.append(
                        f"step {step}, generation {generation}: world sizes {sorted(sizes)} do not agree"
                    )
                there = {line.global_rank for line in lines}
                # One by one and not all: a false huge size must not be counted out.
                missing = list(islice((r for r in range(max(sizes)) if r not in there), _MOST_VIOLATIONS))
                beyond = sorted(rank for rank in there if not 0 <= rank < max(sizes))
                if missing or beyond:
                    more = ", ..." if len(missing) == _MOST_VIOLATIONS else ""
                    found.append(
                        f"step {step}, generation {generation}: global ranks {missing}{more} are missing"
                        + (f", {beyond} are not of it" if beyond else "")
                    )
                if len({line.epoch for line in lines}) > 1:
                    found.append(f"step {step}, generation {generation}: ranks were in different epochs")
            newest = max(generations)
            if previous is not None:
                if step != previous[0] + 1:
                    found.append(f"steps {previous[0] + 1}..{step - 1} are missing")
                if min(generations) < previous[1]:
                    found.append(f"step {step} is of an earlier generation than step {previous[0]}")
            previous = (step, newest)
        return found

    def _sample_violations(
        self, dataset_length: int, epochs: int, samples_per_epoch: int | None
    ) -> list[str]:
        found = []
        used: dict[int, dict[int, int]] = {epoch: {} for epoch in range(epochs)}
        for line in self.lines:
            of_epoch = used.setdefault(line.epoch, {})
            for sample in line.samples:
                if not 0 <= sample < dataset_length:
                    found.append(f"step {line.step}: sample {sample} is not in the data set")
                if sample in of_epoch:
                    found.append(
                        f"epoch {line.epoch}: sample {sample} was used in steps {of_epoch[sample]} "
                        f"and {line.step}"
                    )
                of_epoch[sample] = line.step
        expected = dataset_length if samples_per_epoch is None else samples_per_epoch
        for epoch in range(epochs):
            if len(used[epoch]) < expected:
                missing = [s for s in range(dataset_length) if s not in used[epoch]]
                shown = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
                found.append(
                    f"epoch {epoch}: {expected - len(used[epoch])} of {expected} samples were never used "
                    f"(not used: {shown})"
                )
            elif len(used[epoch]) > expected:
                found.append(f"epoch {epoch}: {len(used[epoch])} samples were used instead of {expected}")
        return found


def _in_order(resumptions: Iterable[Resumption]) -> tuple[Resumption, ...]:
    """Every rank writes its own; the earliest of each counts for all."""
    first: dict[tuple[int, str, int], Resumption] = {}
    for one in sorted(resumptions, key=_order):
        first.setdefault((one.run, one.job, one.generation), one)
    return tuple(first.values())


def _era(line: LedgerLine, starts: Sequence[Resumption]) -> tuple[int, float]:
    """The order of the start that `line` follows."""
    own = [r for r in starts if r.job == line.job and r.generation <= line.generation]
    return max((_order(r) for r in own), default=_BEFORE_ALL)


def _is_void(line: LedgerLine, starts: Sequence[Resumption]) -> bool:
    era = _era(line, starts)
    return any(_order(r) > era and line.step > r.resumed_at_step for r in starts)


def read(directory: str | Path) -> Ledger:
    """All ledger files of a directory; it may still be written to. Lines that a resumption undid do not count."""
    lines = []
    resumptions = []
    torn = 0
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        for text in path.read_bytes().split(b"\n"):
            if not text:
                continue
            try:
                if is_resumption(text):
                    resumptions.append(decode_resumption(text))
                else:
                    lines.append(decode_line(text))
            except ValueError:
                torn += 1
    return Ledger.of(lines, torn, resumptions)
