"""A queue of events in the order of time, and the failures and repairs of a cluster's nodes.

Pure: randomness comes from a generator that the caller gives. Equal times keep the order in which they were added.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class EventQueue(Generic[T]):
    """now_s: the time of the event that was taken last."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._number = itertools.count()
        self.now_s = 0.0

    def add(self, at_s: float, event: T) -> None:
        """Raises ValueError for a time that is past."""
        if at_s < self.now_s:
            raise ValueError(f"{event} at {at_s:g} s lies before {self.now_s:g} s")
        heapq.heappush(self._heap, (at_s, next(self._number), event))

    def take(self, until_s: float) -> tuple[float, T] | None:
        """The next event that lies before `until_s`; None if there is none, and then it is `until_s`."""
        if not self._heap or self._heap[0][0] >= until_s:
            self.now_s = until_s
            return None
        at_s, _, event = heapq.heappop(self._heap)
        self.now_s = at_s
        return at_s, event


class What(Enum):
    """FAILED: the node is gone. REPAIRED: it, or another in its place, starts the job's command."""

    FAILED = "failed"
    REPAIRED = "repaired"


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """slot: the node's place in the cluster. is_silent: its connections stay open and nothing answers."""

    at_s: float
    slot: int
    what: What
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class FailureModel:
    """mean_s: between two failures of one node. repair_s: until another takes its place. silent_share: of failures that
    close no connection, such as a cut cable or a frozen kernel."""

    mean_s: float
    repair_s: float
    silent_share: float = 0.0


def node_events(
    nodes: int, model: FailureModel, until_s: float, random: np.random.Generator
) -> list[NodeEvent]:
    """What happens to each node until then, in the order of time. The last node never fails alone: a failure that would
    leave none is dropped, so that a job has a place to go on."""
    queue: EventQueue[tuple[int, What]] = EventQueue()
    for slot in range(nodes):
        queue.add(random.exponential(model.mean_s), (slot, What.FAILED))
    found, up = [], nodes
    while (taken := queue.take(until_s)) is not None:
        at_s, (slot, what) = taken
        if what is What.FAILED and up == 1:
            queue.add(at_s + random.exponential(model.mean_s), (slot, what))
            continue
        if what is What.FAILED:
            found.append(NodeEvent(at_s, slot, what, bool(random.random() < model.silent_share)))
            queue.add(at_s + model.repair_s, (slot, What.REPAIRED))
            up -= 1
        else:
            found.append(NodeEvent(at_s, slot, what))
            queue.add(at_s + random.exponential(model.mean_s), (slot, What.FAILED))
            up += 1
    return found
