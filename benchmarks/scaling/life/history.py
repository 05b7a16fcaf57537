"""Simulates the life of a job whose nodes fail and come back, and accounts for all of its time.

Every system meets the same events. Training between two events is a rate, so a month takes no longer than its events.
Time is counted in seconds of the whole job without a failure; the parts of an account sum to the wall time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from benchmarks.scaling.life.events import EventQueue, NodeEvent, What
from benchmarks.scaling.life.membership import Membership
from benchmarks.scaling.life.recovery import Assumptions, Recovery, join_pause_s, pause_s


@dataclass(frozen=True, slots=True)
class JobShape:
    """step_s: with all nodes. compute_s: the part that fewer nodes make longer, as the global batch stays the same.
    copy_s: of the state to a joiner, or from a checkpoint."""

    nodes: int
    step_s: float
    compute_s: float
    copy_s: float

    def share(self, nodes: int) -> float:
        """Of the full throughput that so many nodes reach."""
        slower_s = self.step_s - self.compute_s + self.compute_s * self.nodes / nodes
        return self.step_s / slower_s


@dataclass(slots=True)
class Account:
    """Seconds. useful: of steps that count. missing: nodes that were away. paused: all stood still. redone: steps that
    were lost and trained again. checkpoints: written while all stood still. losses, joins: events."""

    wall_s: float = 0.0
    useful_s: float = 0.0
    missing_s: float = 0.0
    paused_s: float = 0.0
    redone_s: float = 0.0
    checkpoints_s: float = 0.0
    losses: int = 0
    joins: int = 0

    @property
    def goodput(self) -> float:
        """Of the throughput of a job without a failure."""
        return self.useful_s / self.wall_s

    @property
    def goodput_of_present(self) -> float:
        """The same, without the time that missing nodes cost: what the system itself loses."""
        return self.useful_s / (self.wall_s - self.missing_s)


class _Internal(Enum):
    CHECKPOINT = "checkpoint"
    JOINED = "joined"


def checkpoint_interval_s(cost_s: float, between_s: float) -> float:
    """The best interval for a system that goes back to its last checkpoint every between_s (Young's formula)."""
    return math.sqrt(2 * cost_s * between_s)


class History:
    """membership: the runtime's own decisions accompany the events and must agree with them; None: do without."""

    def __init__(
        self,
        shape: JobShape,
        recovery: Recovery,
        assumed: Assumptions,
        interval_s: float,
        membership: Membership | None = None,
    ) -> None:
        self._shape = shape
        self._recovery = recovery
        self._assumed = assumed
        self._interval_s = interval_s
        self._membership = membership
        self._agents = dict(enumerate(membership.nodes)) if membership is not None else {}
        self._queue: EventQueue[NodeEvent | tuple[_Internal, int]] = EventQueue()
        self._inside = set(range(shape.nodes))
        self._present = set(self._inside)
        self._paused_until_s = 0.0
        self._writes_until_s = 0.0
        self._now_s = 0.0
        self._since_checkpoint_s = 0.0
        self.account = Account()

    def run(self, events: Sequence[NodeEvent], until_s: float) -> Account:
        for event in events:
            self._queue.add(event.at_s, event)
        self._queue.add(self._interval_s, (_Internal.CHECKPOINT, 0))
        while (taken := self._queue.take(until_s)) is not None:
            at_s, event = taken
            self._advance(at_s)
            if not isinstance(event, NodeEvent):
                self._internal(at_s, *event)
            elif event.what is What.FAILED:
                self._lost(event)
            else:
                self._present.add(event.slot)
                ready_s = at_s + self._recovery.start_s
                self._queue.add(ready_s, (_Internal.JOINED, event.slot))
        self._advance(until_s)
        self.account.wall_s = until_s
        return self.account

    # -- events

    def _lost(self, event: NodeEvent) -> None:
        self._present.discard(event.slot)
        if event.slot not in self._inside:
            return  # it had not joined again yet
        self._inside.discard(event.slot)
        self.account.losses += 1
        if self._membership is not None:
            self._membership.lose(self._agents.pop(event.slot), event.at_s)
            self._check()
        self._go_back()
        copy_s = self._shape.copy_s
        self._pause(pause_s(self._recovery, len(self._inside), event.is_silent, copy_s, self._assumed))

    def _internal(self, at_s: float, what: _Internal, slot: int) -> None:
        if what is _Internal.CHECKPOINT:
            self._queue.add(at_s + self._interval_s, (what, 0))
            if at_s >= self._paused_until_s:
                self._writes_until_s = self._paused_until_s = at_s + self._assumed.checkpoint_s
                self._since_checkpoint_s = 0.0
            return
        if slot not in self._present or slot in self._inside:
            return
        self._inside.add(slot)
        self.account.joins += 1
        if self._membership is not None:
            self._membership.join(at_s)
            self._agents[slot] = next(a for a in self._membership.nodes if a not in self._agents.values())
            self._check()
        if self._recovery.restarts_all:
            self._go_back()
        shape = self._shape
        nodes = len(self._inside)
        self._pause(join_pause_s(self._recovery, nodes, shape.copy_s, shape.step_s, self._assumed))

    def _go_back(self) -> None:
        """To the last checkpoint, or to the beginning of the step: half a step on average."""
        lost_s = self._shape.step_s / 2
        if self._recovery.restarts_all:
            lost_s, self._since_checkpoint_s = self._since_checkpoint_s, 0.0
        lost_s = min(lost_s, self.account.useful_s)
        self.account.useful_s -= lost_s
        self.account.redone_s += lost_s

    def _pause(self, seconds: float) -> None:
        """A second change during a pause begins it anew."""
        self._paused_until_s = max(self._paused_until_s, self._now_s + seconds)

    def _check(self) -> None:
        assert self._membership is not None
        found = set(self._membership.nodes)
        if found != set(self._agents.values()) or len(found) != len(self._inside):
            raise RuntimeError(
                f"the leader's generation has {len(found)} nodes, the events {len(self._inside)}"
            )

    # -- time

    def _advance(self, at_s: float) -> None:
        account, began_s = self.account, self._now_s
        self._now_s = at_s
        writing_s = max(0.0, min(at_s, self._writes_until_s) - began_s)
        stopped_s = max(0.0, min(at_s, self._paused_until_s) - began_s)
        account.checkpoints_s += writing_s
        account.paused_s += stopped_s - writing_s
        trains_s = at_s - began_s - stopped_s
        share = self._shape.share(len(self._inside))
        account.useful_s += share * trains_s
        account.missing_s += (1 - share) * trains_s
        self._since_checkpoint_s += share * trains_s
