"""Decides which lines of the ledger this rank must write now, from the committed steps whose lines may be missing.

Owns the release rule (rule 5 of a step). Pure: knows no file and no samples; a `Line` names what to write.
Invariants: a line is returned only when every member of the generation in force has the step, so it cannot be
undone; a step is kept until every rank is known to have written its line or had it written by another.
The caller that receives lines writes them before it contributes to another collective.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Set
from dataclasses import dataclass
from typing import NamedTuple

Roster = Collection[str]
"""The worker_ids of the generation in force."""


class Entry(NamedTuple):
    """A committed step, with all that is needed to write any rank's line of it.

    step: its number, as in its StepPlan. position: the loader's, as sorted items. workers: worker_ids by global_rank.
    healing: ranks with a share of 0. time_s: when this rank, or the one it copied, committed it. job: the nonce of the
    job that committed it; a job that goes on from its checkpoint has another.
    """

    generation: int
    step: int
    position: tuple[tuple[str, int], ...]
    workers: tuple[str, ...]
    healing: frozenset[int] = frozenset()
    time_s: float = 0.0
    job: str = ""

    @property
    def world_size(self) -> int:
        return len(self.workers)


@dataclass(frozen=True, slots=True)
class Line:
    """The ledger's line of one rank in one step; `global_rank` is of the entry's generation."""

    entry: Entry
    global_rank: int


class Kept(NamedTuple):
    """A committed step that is kept in the history.

    released_in_step: the step whose reduction showed that every worker has this one; None until then.
    """

    entry: Entry
    released_in_step: int | None = None


class History(NamedTuple):
    """The kept steps, oldest first: two in steady state, one more per step in which a worker healed."""

    kept: tuple[Kept, ...] = ()

    def committed(self, entry: Entry) -> History:
        """Returns the history with `entry` added, which this rank committed at a boundary.

        Raises ValueError if `entry` does not follow the last one.
        """
        if self.kept:
            last = self.kept[-1].entry
            is_earlier = entry.job == last.job and entry.generation < last.generation
            if entry.step != last.step + 1 or is_earlier:
                raise ValueError(
                    f"step {entry.step} of generation {entry.generation} committed after "
                    f"step {last.step} of generation {last.generation}"
                )
        return History((*self.kept, Kept(entry)))

    def collective_completed(
        self, step: int, healing: Set[int], me: str, roster: Roster
    ) -> tuple[History, tuple[Line, ...]]:
        """Returns the new history and the lines to write now, after a collective completed on this rank.

        The collective is the last reduction of `step`, or the first collective of the end; it completed, so all of
        `roster` contributed. step: as in its StepPlan; at the end, that of the step that would be next. healing: ranks
        with a share of 0 in that step.
        """
        if healing:
            # They contributed without having the state: nothing is known to be with everyone.
            return self, ()
        kept: list[Kept] = []
        lines: list[Line] = []
        for k in self.kept:
            if k.released_in_step is None:
                k = Kept(k.entry, step)
                lines += _lines(k.entry, me, roster, own=True)
            elif k.released_in_step < step:
                # Everyone committed the step that released it, hence wrote, before contributing to this one.
                continue
            kept.append(k)
        return History(tuple(kept)), tuple(lines)

    def entered(self, me: str, roster: Roster) -> tuple[Line, ...]:
        """Returns the lines, of released steps, whose rank is gone and may have died before it wrote.

        Called when this rank has exchanged names in a new generation. Lines of steps that are not released wait: a rank
        that is behind may yet undo these steps.
        """
        return tuple(
            line
            for k in self.kept
            if k.released_in_step is not None
            for line in _lines(k.entry, me, roster, own=False)
        )

    def copied(self, me: str, roster: Roster) -> tuple[History, tuple[Line, ...]]:
        """Returns this rank's new history and the lines to write now, after it swapped in a holder's state.

        self is that holder's history at its last boundary. Every worker has a step that the holder released, but this
        rank may not have written its line of it.
        """
        return self, tuple(
            line
            for k in self.kept
            if k.released_in_step is not None
            for line in _lines(k.entry, me, roster, own=True)
        )

    def resumed(self) -> History:
        """Returns the history for a job that goes on from a checkpoint.

        All of it is final, but lines may be missing.
        """
        return History(tuple(k._replace(released_in_step=k.entry.step) for k in self.kept))

    def encode(self) -> str:
        """Returns JSON that `decode` reads back to an equal value; it travels with a copied state."""
        return json.dumps(
            [
                {
                    "generation": k.entry.generation,
                    "step": k.entry.step,
                    "position": dict(k.entry.position),
                    "workers": list(k.entry.workers),
                    "healing": sorted(k.entry.healing),
                    "time_s": k.entry.time_s,
                    "job": k.entry.job,
                    "released_in_step": k.released_in_step,
                }
                for k in self.kept
            ]
        )

    @staticmethod
    def decode(text: str) -> History:
        return History(
            tuple(
                Kept(
                    Entry(
                        generation=k["generation"],
                        step=k["step"],
                        position=tuple(sorted(k["position"].items())),
                        workers=tuple(k["workers"]),
                        healing=frozenset(k["healing"]),
                        time_s=k["time_s"],
                        job=k["job"],
                    ),
                    k["released_in_step"],
                )
                for k in json.loads(text)
            )
        )


def _lines(entry: Entry, me: str, roster: Roster, own: bool) -> list[Line]:
    """Returns the lines of the ranks that are gone, and with `own` also this rank's.

    A worker that was dropped and is back writes its own: it copies this history before it can contribute.
    """
    return [
        Line(entry, global_rank)
        for global_rank, worker_id in enumerate(entry.workers)
        if worker_id not in roster or (own and worker_id == me)
    ]
