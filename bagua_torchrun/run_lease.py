"""Writes keys that outlive the agents of a run by a limited time, so that no run leaves its keys behind.

Every write hangs its key on a lease of this process. A lease is replaced by a new one before it is half over; the old
one ends by itself, and by then every key that is still used hangs on a newer one. No thread renews anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from bagua_agent.base.errors import LeaseLost
from bagua_agent.etcd.client import Compare, Put, Store


class LeasedKeys:
    """Writes the keys of one process. Thread-safe: torchrun's heartbeat writes beside its main thread."""

    def __init__(self, store: Store, ttl_s: int, now: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._ttl_s = ttl_s
        self._now = now
        self._lock = threading.Lock()
        self._lease_id = 0
        self._granted_at_s = 0.0

    def put_if(self, compare: Compare, key: str, value: bytes) -> bool:
        """Writes `key` if the comparison holds. Returns whether it did. Raises OutcomeUnknown, StoreUnavailable."""
        try:
            return self._put_if(compare, key, value)
        except LeaseLost:  # etcd lost its leases, as after a restore from a backup
            self._forget()
            return self._put_if(compare, key, value)

    def put(self, key: str, value: bytes) -> None:
        """Writes `key`, maybe more than once. Raises StoreUnavailable."""
        try:
            self.store.put(key, value, self._lease())
        except LeaseLost:
            self._forget()
            self.store.put(key, value, self._lease())

    def _put_if(self, compare: Compare, key: str, value: bytes) -> bool:
        return self.store.transact([compare], [Put(key, value, self._lease())]).succeeded

    def _lease(self) -> int:
        with self._lock:
            if not self._lease_id or self._now() - self._granted_at_s > self._ttl_s / 2:
                asked_at_s = self._now()
                self._lease_id = self.store.lease_grant(self._ttl_s).lease_id
                self._granted_at_s = asked_at_s
            return self._lease_id

    def _forget(self) -> None:
        with self._lock:
            self._lease_id = 0
