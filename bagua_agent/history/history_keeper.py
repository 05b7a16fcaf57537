"""Decides which agent writes which event: each agent its own events, the leader those of the job.

While there is no leader, every agent remembers what it saw, and the next leader writes it. The leader also removes the
oldest events. Called from the loop's thread; only `flush` waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from bagua_agent.base.ids import LONGEST_ID
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.history.job_history import JobEvent, superfluous

MOST_OWED = 64


class Writer(Protocol):
    def write(self, key: str, value: bytes) -> None: ...

    def remove(self, keys: list[str]) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...


class HistoryKeeper:
    def __init__(
        self, keys: JobKeys, node_name: str, writer: Writer, clock_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._keys = keys
        self._node_name = node_name
        self._writer = writer
        self._clock_unix_s = clock_unix_s
        self._leader: str | None = None  # as told by `leader_is`
        self._leading = False
        self._owed: deque[tuple[str, bytes]] = deque(maxlen=MOST_OWED)
        self._revisions: dict[str, int] = {}  # of events that stand

    def own(self, event: JobEvent) -> None:
        """Writes an event that happened here."""
        self._writer.write(*self._encoded(event))

    def of_job(self, event: JobEvent) -> None:
        """Takes an event that every agent sees: the leader writes it, and without a leader it is remembered for the
        next one."""
        if self._leading:
            self._writer.write(*self._encoded(event))
        elif self._leader is None:
            self._owed.append(self._encoded(event))

    def leader_is(self, agent_id: str | None, leading: bool) -> None:
        """Follows a change of the leader. agent_id: of the leader's key. leading: this agent was elected and knows
        it."""
        self._leader, self._leading = agent_id, leading
        if leading:
            for key, value in self._owed:
                self._writer.write(key, value)
        if leading or agent_id is not None:
            self._owed.clear()
        if leading:
            self._trim()

    def saw(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            if not change.key.startswith(self._keys.events):
                continue
            if change.value is None:
                self._revisions.pop(change.key, None)
            else:
                self._revisions[change.key] = change.mod_revision
        if self._leading:
            self._trim()

    def flush(self, timeout_s: float) -> bool:
        """Waits, and tells whether everything is written; for the end only, since it waits."""
        return self._writer.flush(timeout_s)

    def _trim(self) -> None:
        old = superfluous(self._revisions)
        if old:
            self._writer.remove(old)
            for key in old:
                del self._revisions[key]

    def _encoded(self, event: JobEvent) -> tuple[str, bytes]:
        name = event.name[:LONGEST_ID]  # a stranger's id may be as long as ids may be
        return self._keys.event(name), event.encode(self._node_name, self._clock_unix_s())
