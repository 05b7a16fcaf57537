"""Writes the due lines of the ledger: turns commit_history's lines into the file's, with the source's samples.

Owns the writer and the order "written before the next collective", which its callers keep. commit_history.py decides
which lines are due. Without a directory or a source of samples nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bagua_core.communication.step_interface import DataSource, StepPlan
from bagua_core.elastic.ledger.ledger import LedgerLine, LedgerWriter, Resumption
from bagua_core.elastic.state.commit_history import Line


class LedgerLines:
    def __init__(self, writer: LedgerWriter | None, reach: Callable[[str], None]) -> None:
        self.source: DataSource | None = None
        self.job = ""  # its nonce, once known
        self._writer = writer
        self._reach = reach

    def write(self, due: Iterable[Line]) -> None:
        if self._writer is None or self.source is None:
            return
        for line in due:
            self._reach("ledger.before")
            step = line.entry
            position = dict(step.position)
            plan = StepPlan(step.generation, step.step - 1, 0, step.world_size, step.healing)
            self._writer.write(
                LedgerLine(
                    time=step.time_s,
                    generation=step.generation,
                    step=step.step,
                    global_rank=line.global_rank,
                    world_size=step.world_size,
                    epoch=position["epoch"],
                    samples=self.source.samples_of(position, plan, line.global_rank),
                    job=step.job or self.job,
                )
            )

    def end(self) -> None:
        """Stops writing, because another worker writes this one's lines."""
        self._writer = None

    def resumed(self, resumption: Resumption) -> None:
        """Writes that the job goes on from a checkpoint, before any line of what it does then."""
        if self._writer is not None:
            self._writer.write(resumption)
