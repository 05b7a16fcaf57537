"""Keeps keys in the store for as long as this process lives: one lease, its keep-alive, and the keys on it.

`put` and `remove` state the desired keys; one thread writes them and keeps them: across outages, on a new lease if the
old one was lost, again if the store lost its data. Invariants: a key that has the desired value is not written again
(its create revision is the join order); a write that arrives late cannot undo a newer one (every write compares the
revision it knows). Does not know what the keys mean. leased_key_table.py holds the desired and the written keys.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import (
    BaguaError,
    InternalError,
    LeaseLost,
    OutcomeUnknown,
    StoreUnavailable,
    UserError,
)
from bagua_agent.etcd.client import KeyValue, Put, Store, absent, lease_is, mod_revision_is
from bagua_agent.etcd.leased_key_table import LeasedKeyTable

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5
_KEYS_IN_A_WRITE = 100
# Of a request's limit, which is half a lease. When a lease ends, its renewal has hung for 2/3 of it: longer than this.
_STUCK_AFTER = 1.2
_HELD_S = 0.5  # between two looks whether renewals are still held
_CHECKS_AFTER_OUTAGE = 3  # at as many renewals: a frozen endpoint may do late what it was once asked


@dataclass(frozen=True, slots=True)
class LeaseGranted:
    lease_id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """The lease ended in etcd and its keys are gone; those put are written again on the next lease, those
    created by `put_if_absent` are not."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class StoreAway:
    reason: str


@dataclass(frozen=True, slots=True)
class StoreBack:
    pass


@dataclass(frozen=True, slots=True)
class KeepingEnded:
    """The thread that keeps the keys has failed for good: the lease ends, and no key is written again."""

    reason: str


LeaseEvent = LeaseGranted | LeaseLapsed | StoreAway | StoreBack | KeepingEnded


class _Replaced(BaguaError):
    """Raised in a thread that another one has replaced, which keeps the keys now; what this one learned late is
    dropped."""


class LeasedKeys:
    """Keeps keys of this process in the store. Thread-safe; its thread runs from construction to `close`. on_event is
    called from it; if it raises, that is our bug: it is logged, and the keys are kept on."""

    def __init__(
        self,
        store: Store,
        ttl_s: float,
        on_event: Callable[[LeaseEvent], None] | None = None,
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """Starts the thread. ttl_s: after this long without a sign of this process its keys go; etcd counts in whole
        seconds. is_held(): whether the lease is not renewed now, as if this process were frozen; called from the
        thread."""
        if not ttl_s > 0:
            raise UserError(f"a lease of {ttl_s} s ends at once; give at least 1 s")
        self._store = store
        self._ttl_s = math.ceil(ttl_s)
        self._on_event = on_event
        self._is_held = is_held
        # of each request, so that another still fits into the lease
        self._request_s = max(0.2, self._ttl_s / 2)

        self._changed = threading.Condition()
        self._keys = LeasedKeyTable()
        self._lease_id = 0
        self._renewal_due = 0.0
        self._checks_left = 0
        # a check reads the keys' values too: after an outage they may be those of a backup
        self._values_due = False
        self._store_revision = 0
        self._away = False
        self._closing = False
        self._asked_at: float | None = None  # when the thread began the request to etcd that it waits for
        with self._changed:
            self._start_thread()

    @property
    def lease_id(self) -> int:
        """The id of the current lease; 0 while there is none."""
        with self._changed:
            return self._lease_id

    def put(
        self, key: str, value: bytes, is_anothers: Callable[[KeyValue], bool] = lambda found: False
    ) -> None:
        """Makes `value` the value that `key` should hold from now on. Returns at once; written in milliseconds if etcd
        answers.

        is_anothers: whether what is found at the key is another owner's; it is not written over then, and `recheck`
        reads it again. Pure, and called from the thread.
        """
        with self._changed:
            self._refuse_if_closing()
            self._keys.put(key, value, is_anothers)
            self._changed.notify_all()

    def remove(self, key: str) -> None:
        """Removes `key` from now on, unless another process has it by now. Returns at once."""
        with self._changed:
            self._refuse_if_closing()
            self._keys.remove(key)
            self._changed.notify_all()

    def put_if_absent(self, key: str, value: bytes, timeout_s: float | None = None) -> int | None:
        """Returns the create revision of `key` if this process has it on the lease, from now on or since before; None
        if another has it.

        Not written again if it is lost later. Raises StoreUnavailable if neither is certain in time; a key that the
        attempt has created is removed later.
        """
        limit_s = self._store.config.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._refuse_if_closing()
            self._keys.creation_begins(key)
        certain = False
        try:
            lease_id, revision = self._try_until(key, value, deadline, limit_s)
            certain = True
        finally:
            with self._changed:
                self._keys.creation_ends(key)
                if not certain:
                    self._checks_left = _CHECKS_AFTER_OUTAGE
                elif revision is None:
                    self._keys.belongs_to_another(key)
                elif lease_id == self._lease_id:
                    self._keys.created(key, lease_id, revision)
        return revision

    def recheck(self) -> None:
        """Compares the keys with etcd soon; for an owner that saw one vanish. A thread that hangs is replaced."""
        with self._changed:
            self._checks_left = _CHECKS_AFTER_OUTAGE  # one look may come too early
            self._renewal_due = 0.0
            self._changed.notify_all()
            waited_s = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
            if self._closing or waited_s < _STUCK_AFTER * self._request_s:
                return
            stuck = self._thread
            try:
                self._start_thread()
            except RuntimeError as error:  # a limit of the host
                log.error("a request to etcd hangs, and no other thread can be started: %s", error)
                return
        frame = sys._current_frames().get(stuck.ident or 0)
        log.error(
            "bug: a request to etcd of at most %g s has not ended after %.1f s; another thread keeps the keys of this "
            "process from now on. The request waits in\n%s",
            self._request_s,
            waited_s,
            "".join(traceback.format_stack(frame)) if frame else "(it has just ended)",
        )

    def flush(self, timeout_s: float) -> bool:
        """Waits until the store contains everything put and removed so far, at most timeout_s, and returns whether it
        does."""
        with self._changed:
            return (
                self._changed.wait_for(lambda: self._closing or self._keys.all_done, timeout_s)
                and self._keys.all_done
            )

    def close(self, revoke: bool = True) -> None:
        """Ends the thread in bounded time. With revoke the keys go now, else when the lease ends."""
        with self._changed:
            self._closing = True
            lease_id, self._lease_id = self._lease_id, 0
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(4 * self._request_s + 1)
            if self._thread.is_alive():
                raise InternalError("the thread of the leased keys did not end: a callback hangs?")
        if revoke and lease_id:
            try:
                self._store.lease_revoke(lease_id, self._request_s)
            except StoreUnavailable as error:
                log.warning("the keys of this process stay for up to %d s: %s", self._ttl_s, error)

    # ---- put_if_absent

    def _try_until(self, key: str, value: bytes, deadline: float, limit_s: float) -> tuple[int, int | None]:
        """Returns the lease of the last attempt, and the key's create revision on it; None if another has the key."""
        while True:
            with self._changed:
                # a removal on its way would take the new key too
                able = self._changed.wait_for(
                    lambda: self._closing or (self._lease_id and key not in self._keys.removals),
                    deadline - time.monotonic(),
                )
                self._refuse_if_closing()
                lease_id = self._lease_id
            remaining_s = deadline - time.monotonic()
            if not able or remaining_s <= 0:
                raise StoreUnavailable(
                    f"{key}: etcd neither grants nor denies it within {limit_s:g} s; is it up?"
                )
            try:
                answer = self._store.transact(
                    [absent(key)], [Put(key, value, lease_id)], timeout_s=remaining_s
                )
                if answer.succeeded:
                    return lease_id, answer.revision
                kv = self._store.get(key, max(0.001, deadline - time.monotonic()))
                if kv is not None:
                    # ours by an attempt that got no answer, or since before
                    return lease_id, kv.create_revision if kv.lease_id == lease_id else None
            except OutcomeUnknown:
                continue  # the key is absent or another owner's: the same read gives the answer
            except LeaseLost:
                with self._changed:  # the thread finds out, says so, and takes a new lease
                    self._renewal_due = 0.0
                    self._changed.notify_all()
                    self._changed.wait_for(
                        lambda lost=lease_id: self._closing or self._lease_id != lost,  # type: ignore[misc]
                        deadline - time.monotonic(),
                    )

    # ---- the thread

    def _start_thread(self) -> None:
        """Starts the thread that keeps the keys. The lock is held."""
        thread = background_thread("leased-keys", self._run, self._ended)
        thread.start()
        self._thread, self._asked_at = thread, None

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.error("the keys of this process are not kept up any more: %s", end.reason)
            self._tell(KeepingEnded(end.reason))

    def _run(self) -> None:
        failed = 0
        while True:
            with self._changed:
                while not self._closing and not self._work_is_due():
                    self._changed.wait(max(0.0, self._renewal_due - time.monotonic()))
                if self._closing:
                    return
            try:
                self._work()
            except _Replaced:
                return
            except LeaseLost:
                self._lapse(self.lease_id)
                continue
            except Exception as error:
                # UserError: a right or a certificate that was taken away; it may be given back. Others are a bug or a
                # limit of the host: without this thread the lease would end.
                is_usual = isinstance(error, (StoreUnavailable, OutcomeUnknown, UserError))
                if not is_usual and not self._away:  # once an outage
                    log.exception("bug: the keys of this process could not be kept up; trying again")
                self._note_outage(error)
                failed += 1
                with self._changed:
                    pause_s = delay_s(failed, _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
                    self._changed.wait_for(lambda: self._closing, pause_s)
                continue
            failed = 0
            if self._away:
                self._away = False
                self._tell(StoreBack())

    def _work_is_due(self) -> bool:
        return (
            not self._lease_id
            or bool(self._keys.removals or self._keys.to_write())
            or time.monotonic() >= self._renewal_due
        )

    def _work(self) -> None:
        """Does one round: the lease, then what is to be written. Raises when etcd does not do it."""
        with self._changed:
            lease_id, renewal_due = self._lease_id, self._renewal_due
        if not lease_id:
            lease_id = self._grant()
            if not lease_id:
                return
        elif time.monotonic() >= renewal_due:
            if self._is_held():
                with self._changed:
                    self._renewal_due = time.monotonic() + _HELD_S
            else:
                self._renew(lease_id)
        self._write(lease_id)
        self._remove(lease_id)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Surrounds each request of the thread. Raises _Replaced at its end, whatever that was, in a thread that was
        replaced."""
        with self._changed:
            self._asked_at = time.monotonic()
        try:
            yield
        finally:
            with self._changed:
                if self._thread is not threading.current_thread():
                    raise _Replaced
                self._asked_at = None

    def _grant(self) -> int:
        with self._asking():
            granted = self._store.lease_grant(self._ttl_s, self._request_s)
        with self._changed:
            if self._closing:
                return 0  # it ends by itself
            self._lease_id = granted.lease_id
            self._renewal_due = time.monotonic() + granted.ttl_s / 3
            self._changed.notify_all()
        self._tell(LeaseGranted(granted.lease_id, granted.ttl_s))
        return granted.lease_id

    def _renew(self, lease_id: int) -> None:
        began = time.monotonic()
        with self._asking():
            kept = self._store.lease_keepalive_once(lease_id, self._request_s)
        if kept.ttl_s <= 0:
            raise LeaseLost(f"etcd does not know lease {lease_id:x}")
        with self._changed:
            self._renewal_due = began + kept.ttl_s / 3
            if kept.revision < self._store_revision:
                self._checks_left, self._values_due = _CHECKS_AFTER_OUTAGE, True  # the store was set back
            self._store_revision = kept.revision
            check = self._checks_left > 0
        if check:
            self._check(lease_id)

    def _check(self, lease_id: int) -> None:
        """Compares what hangs on the lease with what should, and queues the difference."""
        with self._changed:
            created = self._keys.created_keys
        with self._asking():
            found = self._store.lease_keys(lease_id, self._request_s)
        create_revisions = self._create_revisions(sorted(found & created.keys()))
        with self._changed:
            self._keys.compare(lease_id, found, created, create_revisions)
            self._checks_left = max(0, self._checks_left - 1)
            written = self._keys.written_keys if self._values_due else []
        self._read_back(written, lease_id)
        self._values_due = False

    def _create_revisions(self, keys: Sequence[str]) -> dict[str, int]:
        """Returns the create revisions of those keys that are there."""
        revisions = {}
        for key in keys:
            with self._asking():
                kv = self._store.get(key, self._request_s)
            if kv is not None:
                revisions[key] = kv.create_revision
        return revisions

    def _write(self, lease_id: int) -> None:
        with self._changed:
            values = self._keys.to_write()
            known = {key: self._keys.mod_revision(key) for key in values}
        keys = list(values)
        for chunk in (keys[i : i + _KEYS_IN_A_WRITE] for i in range(0, len(keys), _KEYS_IN_A_WRITE)):
            try:
                with self._asking():
                    answer = self._store.transact(
                        [mod_revision_is(key, known[key]) for key in chunk],
                        [Put(key, values[key], lease_id) for key in chunk],
                        timeout_s=self._request_s,
                    )
            except OutcomeUnknown:
                self._read_back(chunk, lease_id)
                raise
            if answer.succeeded:
                self._note_written({key: (values[key], answer.revision) for key in chunk}, lease_id)
            else:
                self._read_back(chunk, lease_id)

    def _read_back(self, keys: list[str], lease_id: int) -> None:
        """Reads these keys from etcd; the next round writes those that are wrong."""
        for key in keys:
            with self._asking():
                kv: KeyValue | None = self._store.get(key, self._request_s)
            if kv is not None and kv.lease_id == lease_id:
                self._note_written({key: (kv.value, kv.mod_revision)}, lease_id)
                continue
            with self._changed:
                self._keys.not_on_lease(key, kv)

    def _note_written(self, written: dict[str, tuple[bytes, int]], lease_id: int) -> None:
        with self._changed:
            for key, (value, revision) in written.items():
                self._keys.written(key, value, revision, is_current=lease_id == self._lease_id)
                self._store_revision = max(self._store_revision, revision)
            self._changed.notify_all()

    def _remove(self, lease_id: int) -> None:
        with self._changed:
            keys = sorted(self._keys.removals)
        for key in keys:
            # only keys on our lease: by now the key may be another owner's
            with self._asking():
                self._store.transact([lease_is(key, lease_id)], deletes=[key], timeout_s=self._request_s)
            with self._changed:
                self._keys.removed(key)
                self._changed.notify_all()

    # ---- what happened

    def _lapse(self, lease_id: int) -> None:
        """Notes that the lease is gone in etcd, and everything on it."""
        with self._changed:
            if not lease_id or lease_id != self._lease_id:
                return
            self._lease_id = 0
            self._keys.lease_lost()
            self._changed.notify_all()
        self._tell(LeaseLapsed(lease_id))

    def _note_outage(self, error: Exception) -> None:
        with self._changed:
            self._checks_left, self._values_due = _CHECKS_AFTER_OUTAGE, True
            self._renewal_due = 0.0  # the lease is the most urgent once etcd answers again
            first, self._away = not self._away, True
        if first:
            log.info("leased keys: %s", error)
            self._tell(StoreAway(str(error)))

    def _tell(self, event: LeaseEvent) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # the owner's bug must not cost the lease, nor go unseen
            log.exception("bug: on_event of the leased keys raised at %r", event)

    def _refuse_if_closing(self) -> None:
        if self._closing:
            raise InternalError("leased keys are used after they were closed")
