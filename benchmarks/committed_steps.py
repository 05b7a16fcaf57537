"""A live view of a running job's ledger: the steps committed so far, without their samples.

Keeps one entry a step and one a worker, so that it also serves jobs of hundreds of thousands of steps. Independent of
hosts and processes. `tests.lab.ledger` checks the ledger at the end; this module checks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bagua_core.elastic.ledger.ledger import SUFFIX, LedgerLine
from tests.lab.ledger import decode_line, is_resumption


@dataclass(frozen=True, slots=True)
class Committed:
    """A step. time_s: when the first rank whose line is known committed it, seconds since 1970."""

    step: int
    time_s: float
    generation: int
    world_size: int


@dataclass(slots=True)
class WrittenBy:
    """What one worker's file holds: its own lines, and those it wrote for ranks that were gone."""

    first_s: float
    newest_step: int


class LiveLedger:
    """Read on with `read_on`. steps: by number. workers: by worker id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read_bytes: dict[Path, int] = {}
        self.steps: dict[int, Committed] = {}
        self.workers: dict[str, WrittenBy] = {}
        self.newest_step = 0

    def read_on(self) -> None:
        for path in self._directory.glob(f"*{SUFFIX}"):
            begin_bytes = self._read_bytes.get(path, 0)
            if path.stat().st_size <= begin_bytes:
                continue
            with path.open("rb") as stream:
                stream.seek(begin_bytes)
                whole, newline, _ = stream.read().rpartition(b"\n")  # a line may be half written
            self._read_bytes[path] = begin_bytes + len(whole) + len(newline)
            for text in whole.split(b"\n"):
                if text and not is_resumption(text):
                    self._add(path.stem, decode_line(text))

    def _add(self, worker: str, line: LedgerLine) -> None:
        known = self.steps.get(line.step)
        if known is None or line.time < known.time_s:
            self.steps[line.step] = Committed(line.step, line.time, line.generation, line.world_size)
        self.newest_step = max(self.newest_step, line.step)
        written = self.workers.setdefault(worker, WrittenBy(line.time, line.step))
        written.first_s = min(written.first_s, line.time)
        written.newest_step = max(written.newest_step, line.step)

    @property
    def newest(self) -> Committed | None:
        return self.steps.get(self.newest_step)

    @property
    def in_order(self) -> list[Committed]:
        return [self.steps[number] for number in sorted(self.steps)]
