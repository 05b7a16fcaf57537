"""The ledger: records the samples of every committed step, one JSON line per rank and step.

Owns the form of the lines and writes them. The engine decides when a line is due, and whose it is. Imports no torch:
benchmarks and tests that read ledgers use it (tests/lab/ledger.py).
Invariants: each line is one write of one whole line; readers deduplicate by (job, generation, step, global_rank); what
was done after the step from which a later run went on is void.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One rank's part in one committed step.

    time: seconds since 1970 on the machine that wrote it. job: the job's nonce, for each job counts its generations
    from 1.
    """

    time: float
    generation: int
    step: int
    global_rank: int
    world_size: int
    epoch: int
    samples: Sequence[int]
    job: str = ""

    def encode(self) -> bytes:
        values = asdict(self)
        values["samples"] = list(self.samples)
        return json.dumps(values, separators=(",", ":")).encode() + b"\n"


@dataclass(frozen=True, slots=True)
class Resumption:
    """The line that says that generation `generation` of `job` went on from a checkpoint.

    Steps after `resumed_at_step` that an earlier run, or an earlier generation of this job, did are void. run: this
    start's number, which grows from start to start; clocks need not agree on their order.
    """

    time: float
    job: str
    generation: int
    run: int
    resumed_at_step: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"


class LedgerWriter:
    """Appends to <directory>/<worker_id>.jsonl. Never raises into training.

    The first error is said through `on_error`, and writing goes on as far as it can.
    """

    def __init__(self, directory: str | Path, worker_id: str, on_error: Callable[[str], None]) -> None:
        self._path = Path(directory) / f"{worker_id.replace('/', '_')}{SUFFIX}"
        self._on_error = on_error
        self._error_said = False
        self._torn = False
        self._descriptor = -1
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o644)
            size_bytes = os.fstat(self._descriptor).st_size
            # a worker of this name may have died within a line
            self._torn = size_bytes > 0 and os.pread(self._descriptor, 1, size_bytes - 1) != b"\n"
        except OSError as error:
            self._say(error)

    def write(self, line: LedgerLine | Resumption) -> None:
        if self._descriptor < 0:
            return
        data = (b"\n" if self._torn else b"") + line.encode()
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self._say(error)
            return
        if written:
            self._torn = written < len(data)
        if written < len(data):
            self._say(OSError(f"only {written} of {len(data)} bytes were written"))

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError as error:  # a network file system reports a full disk only here
                self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._error_said:
            self._error_said = True
            self._on_error(f"the ledger {self._path} is incomplete: {error}")
