"""The picture that the metrics show of a daemon and, at the one that schedules, of the cluster and its queue, at one
moment."""

from __future__ import annotations

import queue
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from bagua_agent.cluster.cluster_view import UnitState
from bagua_contract import cluster_pb2 as pb

# Upper bounds, in seconds, of the histogram of waits: from a free node at once to a queue of days.
WAIT_BOUNDS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 86_400.0)


@dataclass(frozen=True, slots=True)
class QueuePicture:
    """The cluster as its scheduler sees it. jobs: by state, without those that ended. ended: by outcome, since this
    daemon schedules. nodes: by state. slots: by use. oldest_wait_s: of the jobs that wait now; 0: none waits. waits: of
    jobs that were given their nodes, by WAIT_BOUNDS_S and beyond; wait_sum_s: of these waits."""

    jobs: Mapping[str, int]
    ended: Mapping[str, int]
    nodes: Mapping[str, int]
    slots: Mapping[str, int]
    oldest_wait_s: float
    waits: tuple[int, ...]
    wait_sum_s: float


@dataclass(frozen=True, slots=True)
class DaemonPicture:
    """A daemon at one moment. units: by state. troubles: faults that keep jobs from the node. in_touch: whether etcd's
    watch is connected. queue: at the daemon that schedules; else None."""

    node_name: str
    slots: int
    slots_used: int
    units: Mapping[str, int]
    troubles: int
    in_touch: bool
    queue: QueuePicture | None = None


def picture_of(node: pb.Node, *, in_touch: bool) -> DaemonPicture:
    """Returns the picture of a daemon's own record, without the queue."""
    alive = (pb.Unit.RUNNING, pb.Unit.LEAVING)
    states = Counter(unit.state for unit in node.units)
    return DaemonPicture(
        node_name=node.node_name,
        slots=node.slots,
        slots_used=sum(len(unit.slots) for unit in node.units if unit.state in alive),
        units={state.name.lower(): states[state.value] for state in UnitState},
        troubles=len(node.troubles),
        in_touch=in_touch,
    )


@dataclass(frozen=True, slots=True)
class DaemonPictureAsked:
    """A scrape asks the daemon's loop for a picture; `answer` takes it."""

    answer: queue.SimpleQueue[DaemonPicture] = field(default_factory=queue.SimpleQueue)
