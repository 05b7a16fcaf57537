"""Writes events for people to the store: one thread, a short queue, no guarantee; it never delays a job.

Writes are retried while the store is unavailable; when the queue is full, the oldest events are dropped. Every request
is bounded, and so is `stop`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.etcd.client import Put, Store, absent

log = logging.getLogger(__name__)

REQUEST_S = 1.0
RETRY_S = 0.5
MOST_WAITING = 256
REMOVED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class _Write:
    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class _Removal:
    keys: tuple[str, ...]


class HistoryWriter:
    """Writes events in a thread that runs from construction to `stop`. Thread-safe. tell: gets each event too, with its
    key, whatever the store does; it must not wait."""

    def __init__(self, store: Store, tell: Callable[[str, bytes], object] = lambda key, value: None) -> None:
        self._store = store
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: deque[_Write | _Removal] = deque(maxlen=MOST_WAITING)
        self._busy = False
        self._stopping = False
        self._thread = background_thread("bagua-history", self._run, self._ended)
        self._thread.start()

    def write(self, key: str, value: bytes) -> None:
        """Queues an event to be written once: an existing event is not overwritten."""
        self._tell(key, value)
        self._enqueue(_Write(key, value))

    def remove(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), REMOVED_AT_ONCE):
            self._enqueue(_Removal(tuple(keys[start : start + REMOVED_AT_ONCE])))

    def flush(self, timeout_s: float) -> bool:
        """Waits at most timeout_s, and tells whether nothing waits any more."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout_s)

    def stop(self) -> None:
        """Stops the thread and gives up what still waits."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(REQUEST_S + RETRY_S)

    def _enqueue(self, work: _Write | _Removal) -> None:
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.error("events of the job are not written any more: %s", end.reason)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if self._stopping:
                    return
                work, self._busy = self._waiting.popleft(), True
            try:
                self._do(work)
            except InfrastructureLost:
                with self._changed:
                    if len(self._waiting) < MOST_WAITING:
                        self._waiting.appendleft(work)
                    self._changed.wait_for(lambda: self._stopping, RETRY_S)
            except UserError as error:  # a right that was taken away: events are not worth more than a line
                log.warning("an event of the job could not be written: %s", error)
            except Exception:  # a bug costs this event and no other
                log.exception("bug: an event of the job could not be written; it is dropped")

    def _do(self, work: _Write | _Removal) -> None:
        if isinstance(work, _Write):
            self._store.transact([absent(work.key)], [Put(work.key, work.value)], timeout_s=REQUEST_S)
        else:
            self._store.transact(deletes=work.keys, timeout_s=REQUEST_S)
