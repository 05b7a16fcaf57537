"""Finds this node's workers that hang before they have joined.

The members of the generation in force do not wait for such a worker: they try to build the pending generation in the
background, and train on. So none of them reports a wait, and hang.py has no evidence against it. It shows here: the
worker was listed, others reported that they could not build what lists it, and it has said nothing since. In a large
job an agent does not see others' reports; there the leader's answer to them shows it, the same record again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from bagua_contract.records import Generation, GenerationKind

# A worker that can't reach the others says so after a minute, the time in which members meet (rendezvous.py of the
# core); half a minute more for one that is late.
SILENT_S = 90.0


@dataclass(frozen=True, slots=True)
class SilentJoiner:
    """A worker that has been silent for too long. reason: why it ends, for people."""

    worker_id: str
    reason: str


@dataclass(slots=True)
class SilentJoiners:
    """Remembers which workers have said nothing since they were listed. since: by worker, the generation that first
    listed it since it last said anything, and when."""

    since: dict[str, tuple[int, float]] = field(default_factory=dict)

    def heard(self, worker_id: str) -> None:
        """Forgets a worker that said something, or has ended."""
        self.since.pop(worker_id, None)

    def follow(self, number: int, listed: Iterable[str], now_s: float) -> list[SilentJoiner]:
        """Returns the workers that have been silent for too long, now that generation `number` is written. They should
        end if members could not build the generation before. listed: workers of this node in it."""
        found = [
            SilentJoiner(
                worker_id,
                f"hung: it took no part in building generation {first}, "
                f"and has said nothing for {now_s - since_s:.0f} s",
            )
            for worker_id, (first, since_s) in self.since.items()
            if now_s - since_s >= SILENT_S
        ]
        for worker_id in listed:
            self.since.setdefault(worker_id, (number, now_s))
        return found


def written_again(before: Generation | None, record: Generation) -> bool:
    """Tells whether `record` shows that members could not build `before`, the newest one seen before it: that one never
    came into force, and all its workers are listed again."""
    if before is None or not before.kind is record.kind is GenerationKind.PLANNED:
        return False
    # if one of its joiners had died, the record would lack that one
    listed = {m.worker_id for m in record.members}
    return 0 < record.base < before.number and all(m.worker_id in listed for m in before.members)
