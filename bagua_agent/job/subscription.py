"""Subscribes to the etcd keys that this agent needs, and passes on changes with whole records.

The shell around large_jobs/: scope.py decides which keys to follow, whole_records.py completes heads of records. Called
from the loop's thread; changes come back through the inbox.
"""

from __future__ import annotations

import queue
import threading

from bagua_agent.base.errors import BaguaError
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change, Mirror
from bagua_agent.job.messages import ScopeFollowed, StoreChanged, StoreConnected
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.scope import Scope, ScopeSituation, ranges_of, scope_of
from bagua_agent.large_jobs.whole_records import WholeRecords

START_S = 10.0  # to read a large record that exists when this agent joins


class JobSubscription:
    """This agent's subscription to the job's keys. nodes: how many agents there are as this one joins."""

    def __init__(
        self,
        store: Store,
        keys: JobKeys,
        agent_id: str,
        records: WholeRecords,
        limits: Limits,
        inbox: queue.SimpleQueue[object],
        *,
        hosts_store: bool,
        nodes: int,
    ) -> None:
        self._keys = keys
        self._agent_id = agent_id
        self._records = records
        self._limits = limits
        self._inbox = inbox
        self._hosts_store = hosts_store
        self._scope, _ = scope_of(ScopeSituation(False, hosts_store, False, nodes, Scope.WHOLE), limits)
        self._wanted = self._scope
        self._starting_thread: int | None = None
        self._start_failed: BaguaError | None = None
        self._mirror = Mirror(
            store,
            ranges_of(self._scope, keys, agent_id),
            self._changed,
            lambda connected: inbox.put(StoreConnected(connected)),
        )

    def start(self) -> None:
        """Reports the current content as one batch, then changes. Raises StoreUnavailable, UserError."""
        self._starting_thread = threading.get_ident()
        self._mirror.start()
        if self._start_failed is not None:
            self.stop()
            raise self._start_failed

    def stop(self) -> None:
        self._records.stop()
        self._mirror.stop()

    @property
    def whole(self) -> bool:
        """Whether all keys are followed, and their content was reported so far."""
        return self._scope is Scope.WHOLE

    def state(self) -> dict[str, KeyValue] | None:
        """Returns the current content of the followed keys, with whole records; None while one is still being read."""
        return self._records.whole_state(self._mirror.state())

    def value(self, key: str) -> bytes | None:
        """Returns the value as stored, if the key is followed; a head in place of a large record."""
        return self._mirror.value(key)

    def look(self, *, leads: bool, strange_spec: bool, nodes: int) -> None:
        """Follows the keys that the situation calls for. A change of scope ends in ScopeFollowed."""
        now = ScopeSituation(leads, self._hosts_store, strange_spec, nodes, self._wanted)
        scope, _ = scope_of(now, self._limits)
        if scope is self._wanted:
            return
        self._wanted = scope
        if scope is Scope.OWN:
            self._scope = scope  # keys outside the new scope are absent from now on
        self._mirror.follow(
            ranges_of(scope, self._keys, self._agent_id), lambda: self._inbox.put(ScopeFollowed(scope))
        )

    def followed(self, message: ScopeFollowed) -> None:
        """Takes the message from the inbox that everything of that scope was reported."""
        if message.scope is self._wanted:
            self._scope = message.scope

    def _changed(self, changes: tuple[Change, ...]) -> None:
        if threading.get_ident() == self._starting_thread:
            # The first content is reported in the caller's thread, which must not wait for an unavailable store.
            try:
                changes = self._records.whole(changes, within_s=START_S)
            except BaguaError as error:
                self._start_failed = error
                return
        else:
            changes = self._records.whole(changes)
        if changes:
            self._inbox.put(StoreChanged(changes))
