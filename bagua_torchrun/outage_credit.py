"""Keeps nodes alive in torch's state of a rendezvous over an outage of etcd.

torch removes each node whose last heartbeat in the state is too old. No node can write one while etcd is away, so after
an outage every agent would find all nodes dead, itself among them, and no heartbeat would be written any more. Time in
which etcd did not answer this agent is therefore added to the heartbeats of a state that it reads. A heartbeat is never
moved beyond an outage's end, however many agents add the same outage to it: a node that is dead expires after it.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

MOST_OUTAGES = 16


@dataclass(frozen=True, slots=True)
class Outage:
    """A time without an answer of etcd. ended: by this host's clock."""

    ended: datetime
    length: timedelta


def credited(heartbeat: datetime, outages: Sequence[Outage]) -> datetime:
    """Moves the heartbeat forward by the part of each outage that came after it. Pure. outages: oldest first."""
    for outage in outages:
        ended = outage.ended if heartbeat.tzinfo is not None else outage.ended.replace(tzinfo=None)
        if heartbeat < ended:
            heartbeat = min(heartbeat + outage.length, ended)
    return heartbeat


class OutageCredit:
    """Measures the outages of etcd for one agent, and adds them to heartbeats.

    Not thread-safe: torch reads the state from one thread at a time.
    """

    def __init__(
        self,
        interval_s: float,
        dead_after_s: float,
        now_s: Callable[[], float] = time.monotonic,
        utc: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Takes torch's settings of heartbeats.

        interval_s: between two heartbeats of a node. dead_after_s: torch removes a node whose heartbeat is older.
        """
        self._interval_s = interval_s
        self._dead_after = timedelta(seconds=dead_after_s)
        self._now_s = now_s
        self._utc = utc
        self._outages: list[Outage] = []
        self._answered_s: float | None = None  # when etcd last did
        self._waiting_since_s: float | None = None  # when the first request without an answer began
        self._has_read = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Measures the requests to etcd within, which belong together. An exception means that etcd did not answer."""
        if self._waiting_since_s is None:
            self._waiting_since_s = self._now_s()
        yield
        now_s = self._now_s()
        began_s, self._waiting_since_s = self._waiting_since_s, None
        if now_s - began_s > self._interval_s / 2:
            # It may have begun just after the last answer: other nodes' heartbeats have been missing since then.
            least_s = began_s - self._interval_s
            since_s = least_s if self._answered_s is None else max(least_s, self._answered_s)
            self._note(now_s - since_s)
        self._answered_s = now_s

    def _note(self, length_s: float) -> None:
        self._outages = [*self._outages[1 - MOST_OUTAGES :], Outage(self._utc(), timedelta(seconds=length_s))]

    def add_to(self, state: bytes) -> bytes:
        """Returns the state with outages added to its heartbeats."""
        if self._outages and self._utc() - self._outages[-1].ended > self._dead_after:
            self._outages.clear()  # a heartbeat from before it is too old in any case
        is_first, self._has_read = not self._has_read, True
        if not (self._outages or is_first):
            return state
        try:
            read = pickle.loads(state)  # as torch does next
        except pickle.PickleError:
            return state  # torch reports it
        heartbeats: dict[object, datetime] = read.last_heartbeats
        if is_first:
            self._doubt_the_end_of_all(heartbeats)
        read.last_heartbeats = {node: credited(at, self._outages) for node, at in heartbeats.items()}
        return pickle.dumps(read)

    def _doubt_the_end_of_all(self, heartbeats: dict[object, datetime]) -> None:
        """Gives all nodes the usual time from now on if all look dead at an agent's first reading: a new agent does not
        know of an outage that has just ended, after which the nodes have yet to write."""
        if not heartbeats:
            return
        now = self._utc()
        ages = [now - at.replace(tzinfo=at.tzinfo or UTC) for at in heartbeats.values()]
        if min(ages) > self._dead_after:
            self._outages.append(Outage(now, max(ages)))
