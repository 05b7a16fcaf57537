"""Draws the schedule of faults: their kinds, times and targets. Pure: a seed gives the same schedule everywhere.

Targets are abstract numbers; `choose` maps one to a permitted target when its time has come. A longer schedule of the
same seed begins with the shorter one. Independent of hosts and processes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

T = TypeVar("T")

_VERSION = 1  # a change of the numbers below gives every seed another schedule: say so by another number here
SHORTEST_S, LONGEST_S = 0.2, 5.0  # of a freeze, a cut, and etcd's absence
AT_ONCE_SHARE = 0.12  # of events that come while the one before is still being mended
AT_ONCE_MOST_S = 0.6


class Kind(Enum):
    """The value is what tables show."""

    WORKER_KILLED = "worker killed"
    AGENT_KILLED = "agent killed"
    HOST_KILLED = "host killed"
    NODE_JOINS = "node joins"
    NODE_LEAVES = "node leaves (SIGTERM)"
    AGENT_FROZEN = "agent frozen"
    WORKER_FROZEN = "worker frozen"
    LINK_CUT = "link cut and healed"
    ETCD_MEMBER_RESTARTED = "etcd member restarted"
    ETCD_AWAY = "etcd gone and back"


# Joins are as many as kills and leaves of nodes together: the job neither stays full nor alone.
WEIGHTS: tuple[tuple[Kind, int], ...] = (
    (Kind.WORKER_KILLED, 16),
    (Kind.AGENT_KILLED, 10),
    (Kind.HOST_KILLED, 10),
    (Kind.NODE_JOINS, 24),
    (Kind.NODE_LEAVES, 8),
    (Kind.AGENT_FROZEN, 8),
    (Kind.WORKER_FROZEN, 8),
    (Kind.LINK_CUT, 8),
    (Kind.ETCD_MEMBER_RESTARTED, 6),
    (Kind.ETCD_AWAY, 2),
)
OF_ETCD = frozenset({Kind.ETCD_MEMBER_RESTARTED, Kind.ETCD_AWAY})
LASTING = OF_ETCD | {Kind.AGENT_FROZEN, Kind.WORKER_FROZEN, Kind.LINK_CUT}


@dataclass(frozen=True, slots=True)
class Event:
    """after_s: from the event before it. target: number of whom it hits, see `choose`. length_s: 0 for what does not
    last. at_once: it does not wait until the job has recovered from the event before."""

    number: int
    after_s: float
    kind: Kind
    target: int
    length_s: float = 0.0
    at_once: bool = False

    def __str__(self) -> str:
        lasting = f", for {self.length_s:.2f} s" if self.length_s else ""
        when = f"+{self.after_s:.2f} s"
        return f"{self.number:4}  {when:>9}  {self.kind.value}, target {self.target}{lasting}" + (
            ", at once" if self.at_once else ""
        )


def schedule(seed: int, events: int, every_s: float) -> list[Event]:
    """The first `events` events of this seed, one in `every_s` seconds on average. Raises ValueError."""
    if events < 0 or every_s <= 0:
        raise ValueError(f"{events} events, one every {every_s:g} s, are no schedule")
    chance = random.Random(f"chaos {_VERSION} {seed}")
    kinds = [kind for kind, _ in WEIGHTS]
    weights = [weight for _, weight in WEIGHTS]
    made = []
    for number in range(1, events + 1):
        # all drawn for every event, so that the kind of one has no influence on the next
        kind = chance.choices(kinds, weights)[0]
        target = chance.randrange(1_000)
        length_s = round(SHORTEST_S * (LONGEST_S / SHORTEST_S) ** chance.random(), 3)
        spread, at_once = chance.random(), chance.random() < AT_ONCE_SHARE
        at_once = at_once and number > 1
        after_s = spread * AT_ONCE_MOST_S if at_once else (0.5 + spread) * every_s
        lasts = length_s if kind in LASTING else 0.0
        made.append(Event(number, round(after_s, 3), kind, target, lasts, at_once))
    return made


def choose(target: int, candidates: Sequence[T]) -> T | None:
    """Whom `target` means among these; None without any."""
    return candidates[target % len(candidates)] if candidates else None


@dataclass(frozen=True, slots=True)
class NodeState:
    """What is known of one host when an event is due. runs: a node of the job runs there. has_worker: with a worker
    that has opened its ledger. committed: this worker committed a step a moment ago. touched: an event of this window
    has hit it already."""

    host: int
    runs: bool
    has_worker: bool = False
    committed: bool = False
    touched: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """What an event became. host: None for events of etcd. reason: why it is not what the schedule says, or empty."""

    kind: Kind
    host: int | None
    reason: str = ""


_NEEDS_WORKER = frozenset({Kind.WORKER_KILLED, Kind.WORKER_FROZEN})


def hit(event: Event, nodes: Sequence[NodeState]) -> Hit | None:
    """What `event` does to these nodes; None: nothing can be done now.

    Whatever is hit, another node that committed a moment ago stays untouched for the whole window: it holds the
    job's state. What has nothing to hit becomes a join, and a join without a free host a leave.
    """
    if event.kind in OF_ETCD:
        return Hit(event.kind, None)
    if event.kind is not Kind.NODE_JOINS:
        if victim := choose(event.target, _victims(event.kind, nodes)):
            return Hit(event.kind, victim.host)
        if free := choose(event.target, _free(nodes)):
            return Hit(Kind.NODE_JOINS, free.host, f"{event.kind.value}: nothing may be hit")
        return None
    if free := choose(event.target, _free(nodes)):
        return Hit(Kind.NODE_JOINS, free.host)
    if leaving := choose(event.target, _victims(Kind.NODE_LEAVES, nodes)):
        return Hit(Kind.NODE_LEAVES, leaving.host, "node joins: no host is free")
    return None


def _free(nodes: Sequence[NodeState]) -> list[NodeState]:
    return [n for n in nodes if not n.runs]


def _victims(kind: Kind, nodes: Sequence[NodeState]) -> list[NodeState]:
    holders = [n for n in nodes if n.runs and n.committed and not n.touched]
    return [
        n
        for n in nodes
        if n.runs
        and not n.touched  # one fault a node and window: two on one tell nothing more
        and (n.has_worker or kind not in _NEEDS_WORKER)
        and any(other.host != n.host for other in holders)
    ]
