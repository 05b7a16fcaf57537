"""Compares the final loss of each algorithm with DDP's. Pure: from trainings to ratios and text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import result_file
from benchmarks.fidelity_runs import Trained, baseline_of
from benchmarks.fidelity_tasks import TASKS

WITHIN = 1.02


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one task. Losses: one for each seed. Ratios: to DDP's with the same optimizer, of the same seed;
    empty without any. step_bytes: that a worker sends in a step, the mean. fewer: how many times fewer than DDP."""

    task: str
    system: str
    baseline: str
    train_loss: tuple[float, ...]
    held_out_loss: tuple[float, ...]
    train_ratio: tuple[float, ...]
    held_out_ratio: tuple[float, ...]
    steps: int
    rounds: float | None
    step_bytes: float
    fewer: float | None

    @property
    def is_within(self) -> bool | None:
        """Whether both losses, over all seeds, are at most 2 % above DDP's; None: nothing to compare."""
        if not self.train_ratio:
            return None
        # `not above` would let NaN through
        return all(_mean(r) <= WITHIN for r in (self.train_ratio, self.held_out_ratio))


def rows(trained: Sequence[Trained]) -> list[Row]:
    """One for each task and system, in the order in which they were trained."""
    by_seed = {(t.task, t.system, t.seed): t for t in trained}
    found = []
    for task, system in dict.fromkeys((t.task, t.system) for t in trained):
        own = [t for t in trained if (t.task, t.system) == (task, system)]
        baseline = baseline_of(system, TASKS[task])
        pairs = [(t, by_seed[task, baseline, t.seed]) for t in own if (task, baseline, t.seed) in by_seed]
        rounds = [t.rounds for t in own if t.rounds is not None]
        sent = statistics.fmean(t.sent_bytes for t in own)
        found.append(
            Row(
                task=task,
                system=system,
                baseline=baseline,
                train_loss=tuple(t.train_loss for t in own),
                held_out_loss=tuple(t.held_out_loss for t in own),
                train_ratio=tuple(t.train_loss / ddp.train_loss for t, ddp in pairs),
                held_out_ratio=tuple(t.held_out_loss / ddp.held_out_loss for t, ddp in pairs),
                steps=len(own[0].curve),
                rounds=statistics.fmean(rounds) if rounds else None,
                step_bytes=sent / len(own[0].curve),
                fewer=statistics.fmean(ddp.sent_bytes for _, ddp in pairs) / sent if pairs and sent else None,
            )
        )
    return found


def in_words(found: Sequence[Row]) -> str:
    parts = []
    for task in dict.fromkeys(row.task for row in found):
        own = [row for row in found if row.task == task]
        head = ["system", "beside", "training loss", "x DDP", "held-out loss", "x DDP", "within 2 %"]
        head += ["bytes a step", "x fewer"]
        cells = [
            [
                row.system + (f" (a round every {row.steps / row.rounds:.1f} steps)" if row.rounds else ""),
                row.baseline,
                f"{_mean(row.train_loss):.4f}",
                _ratio(row.train_ratio),
                f"{_mean(row.held_out_loss):.4f}",
                _ratio(row.held_out_ratio),
                "-" if row.system == row.baseline else {True: "yes", False: "no", None: "-"}[row.is_within],
                f"{row.step_bytes:,.0f}",
                "-" if row.fewer is None else f"{row.fewer:.1f}",
            ]
            for row in own
        ]
        parts += [f"## {task}: {own[0].steps} steps", "", result_file.table(head, cells), ""]
    return "\n".join(parts)


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _ratio(values: Sequence[float]) -> str:
    return f"{_mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"
