"""A local copy of ranges of the store, which stays up to date and reports every change.

Owns one thread and one stream of watches. Invariants: each change is reported once, those of one range in the order of
revisions and those that one transaction made in one range together; after a gap in the history of the store
(compaction, a store that lost its data) the difference is reported instead, as of one revision. Does not know what the
keys mean.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bagua_agent.base.background import Failed, OperationEnd, background_thread, describe
from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import InternalError, UserError
from bagua_agent.etcd.client import KeyValue, Store, read_at, read_ranges
from bagua_agent.etcd.connection import Connection
from bagua_agent.etcd.endpoints import Endpoint
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble
from bagua_agent.etcd.key_range import KeyRange, decode_key
from bagua_agent.etcd.watch_stream import WatchStream
from bagua_contract import etcd_pb2 as pb

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one key. value is None if the key was removed; create_revision is then that of the removed key, and
    mod_revision the revision of the removal, as far as it is known."""

    key: str
    value: bytes | None
    mod_revision: int
    create_revision: int
    lease_id: int = field(default=0, compare=False)  # of the value; 0 for none


def difference(old: Mapping[str, KeyValue], new: Mapping[str, KeyValue], revision: int) -> tuple[Change, ...]:
    """Returns the changes that lead from `old` to `new`, seen at `revision`: removals first, then writes by revision;
    pure."""
    removed = sorted(old.keys() - new.keys())
    written = sorted(
        (kv for k, kv in new.items() if old.get(k) != kv), key=lambda kv: (kv.mod_revision, kv.key)
    )
    return (
        *(Change(key, None, revision, old[key].create_revision) for key in removed),
        *(Change(kv.key, kv.value, kv.mod_revision, kv.create_revision, kv.lease_id) for kv in written),
    )


class Mirror:
    """A copy of ranges of the store. After `start`, on_changes is called with each batch of changes, first from `start`
    itself with all keys, later from the mirror's thread; never twice at a time. on_connection tells whether the watch
    is up. A callback that raises is our bug: it is logged, and the mirror goes on."""

    def __init__(
        self,
        store: Store,
        ranges: Sequence[KeyRange],
        on_changes: Callable[[tuple[Change, ...]], None],
        on_connection: Callable[[bool], None] | None = None,
        silence_s: float = 1.0,
    ) -> None:
        """Prepares the mirror; `start` reads. ranges: disjoint. silence_s: how long the watch may be silent before the
        endpoint must show that it lives; as long again without an answer, and another endpoint is taken."""
        self._store = store
        self._ranges = tuple(ranges)  # that the state is of; changed by the thread alone
        self._wanted: tuple[tuple[KeyRange, ...], Callable[[], None] | None] | None = None  # by `follow`
        self._on_changes = on_changes
        self._on_connection = on_connection
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._state: dict[str, KeyValue] = {}
        self._revisions: dict[KeyRange, int] = {}  # up to which the state is complete
        self._stopping = threading.Event()
        self._connection: Connection | None = None
        self._stream: WatchStream | None = None
        self._connected = False
        self._history_lost = False  # etcd said that it no longer has the revision we would go on from
        self._complaints: set[str] = set()  # of the present outage
        self._thread: threading.Thread | None = None

    def start(self, timeout_s: float | None = None) -> None:
        """Reads the ranges, tells them as one batch, begins to watch. Raises StoreUnavailable, UserError."""
        if self._thread is not None:
            raise InternalError(f"the mirror of {self._name} was started twice")
        keys, revision = self._store.get_ranges(self._ranges, timeout_s)
        self._thread = background_thread("store-mirror", self._run, self._ended)
        self._replace(keys, revision)
        self._thread.start()

    def follow(self, ranges: Sequence[KeyRange], on_followed: Callable[[], None] | None = None) -> None:
        """Changes the ranges that the state is of. Returns at once; the difference comes as one batch when the store
        has answered, then on_followed is called, both from the mirror's thread. A newer call replaces an older one."""
        with self._lock:
            self._wanted = (tuple(ranges), on_followed)
            stream = self._stream
        if stream is not None:
            stream.close()

    @property
    def _name(self) -> str:
        return ", ".join(map(str, self._ranges))

    def stop(self, timeout_s: float = 2.0) -> None:
        """Ends the thread; no callback runs after it returns. From a callback: ends after that callback."""
        with self._lock:
            self._stopping.set()
            connection = self._connection
        if connection is not None:
            connection.close()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError(
                f"the mirror of {self._name} did not end in {timeout_s:g} s: a callback hangs?"
            )

    def state(self) -> dict[str, KeyValue]:
        """Returns a copy of all keys."""
        with self._lock:
            return dict(self._state)

    def value(self, key: str) -> bytes | None:
        with self._lock:
            kv = self._state.get(key)
            return None if kv is None else kv.value

    @property
    def revision(self) -> int:
        """The revision up to which `state` is complete."""
        with self._lock:
            return min(self._revisions.values(), default=0)

    # ---- the thread

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.error("%s is not watched any more: %s", self._name, end.reason)
            self._tell_connection(False)

    def _run(self) -> None:
        endpoints = self._store.config.endpoints
        index = failed_since_pause = pauses = 0
        while not self._stopping.is_set():
            config = self._store.config
            # Where all mirrors read at once, as after a restart of etcd, one page takes longer than usual.
            page_s = delay_s(1 + pauses, config.attempt_timeout_s, config.request_timeout_s)
            try:
                self._follow(endpoints[index], page_s)
            except CallFailed as error:
                if not self._stopping.is_set():
                    level = logging.ERROR if error.failure.trouble is Trouble.DENIED else logging.INFO
                    self._complain(level, endpoints[index], error)
            except UserError as error:  # a certificate that was readable at the start
                self._complain(logging.ERROR, endpoints[index], error)
            except Exception as error:  # a bug, or a limit of the host; without this thread nothing is seen
                if self._is_new_complaint(endpoints[index], error):
                    log.exception("bug: the watch of %s raised; it is begun anew", self._name)
            if self._connected:
                failed_since_pause = pauses = 0
            self._tell_connection(False)
            index = (index + 1) % len(endpoints)
            failed_since_pause += 1
            if failed_since_pause >= len(endpoints):
                failed_since_pause = 0
                pauses += 1
                pause_s = delay_s(pauses, _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
                self._stopping.wait(pause_s * random.uniform(0.5, 1.5))

    def _complain(self, level: int, endpoint: Endpoint, error: Exception) -> None:
        if self._is_new_complaint(endpoint, error):
            log.log(level, "watch of %s at %s: %s", self._name, endpoint, error)

    def _is_new_complaint(self, endpoint: Endpoint, error: Exception) -> bool:
        """Tells whether a complaint is to be logged, once an outage and reason: an etcd that is away for hours must not
        fill the log."""
        complaint = f"{endpoint}: {describe(error)}"
        if complaint in self._complaints:
            return False
        self._complaints.add(complaint)
        return True

    def _follow(self, endpoint: Endpoint, page_s: float) -> None:
        """Watches at this endpoint until the connection breaks (CallFailed) or the mirror stops. page_s: of each
        request of a reading."""
        connection = self._store.connection(endpoint)
        try:
            with self._lock:
                self._connection = connection  # from here on `stop` ends what runs on it
            while not self._stopping.is_set():
                store_revision = self._catch_up(connection, page_s)
                with self._lock:
                    starts = [(keys, self._revisions[keys] + 1) for keys in self._ranges]
                stream = WatchStream(connection, starts, self._silence_s)
                try:
                    if self._may_read(stream):
                        self._read(stream, store_revision, connection)
                finally:
                    with self._lock:
                        self._stream = None
                    stream.close()
        finally:
            with self._lock:
                self._connection = None
            connection.close()

    def _may_read(self, stream: WatchStream) -> bool:
        """Tells whether the stream is still of what is wanted; from here on `follow` ends it."""
        with self._lock:
            self._stream = stream
            return self._wanted is None

    def _read(self, stream: WatchStream, store_revision: int, connection: Connection) -> None:
        """Applies the stream until it ends; returns if the ranges must be read again."""
        created = 0
        for response in stream:
            if response.compact_revision or (response.created and response.header.revision < store_revision):
                # compacted, or another store than the one that was asked a moment ago
                self._history_lost = True
                return
            if response.canceled:
                connection.forget_token()  # the most likely reason, and harmless otherwise
                raise CallFailed(
                    Failure(Trouble.REFUSED, response.cancel_reason or "etcd cancelled the watch")
                )
            if response.created:
                created += 1
                if created == len(self._ranges):
                    self._complaints.clear()
                    self._tell_connection(True)
            if response.events:
                self._apply(response.events)

    def _catch_up(self, connection: Connection, page_s: float) -> int:
        """Makes sure that the store's history leads on from our state, or takes over its present state.

        Returns a revision that the store has reached.
        """
        with self._lock:
            wanted = self._wanted
        if wanted is None and not self._history_lost:
            store_revision = self._confirmed(connection, page_s)
            if store_revision is not None:
                return store_revision
        ranges, on_followed = wanted if wanted is not None else (self._ranges, None)
        keys, revision = read_ranges(connection, ranges, page_s)
        self._history_lost = False
        with self._lock:
            self._ranges = ranges
            if self._wanted is wanted:
                self._wanted = None
        self._replace(keys, revision)
        if on_followed is not None:
            self._tell_followed(on_followed)
        return revision

    def _confirmed(self, connection: Connection, page_s: float) -> int | None:
        """Returns the store's revision, if at the revision of our state it held the same; None if its history is
        another one: a store that lost its data or was set back to a backup, and perhaps has grown past our revision
        since.

        If it did, the changes after our revision lead on from our state. All keys are compared: any one of them may
        have been in the backup, and a store that was set back may have the same terms and ids as before.
        """
        with self._lock:
            state, revisions = dict(self._state), dict(self._revisions)
        found: dict[str, KeyValue] = {}
        store_revision = 0
        for keys in self._ranges:
            try:
                there, store_revision = read_at(connection, keys, revisions[keys], page_s)
            except CallFailed as error:
                if error.failure.trouble is Trouble.HISTORY_GONE:
                    return None
                raise
            found.update({kv.key: kv for kv in there})
        return store_revision if found == state else None

    # ---- state

    def _replace(self, keys: Iterable[KeyValue], revision: int) -> None:
        new = {kv.key: kv for kv in keys}
        with self._lock:
            changes = difference(self._state, new, revision)
            self._state = new
            self._revisions = dict.fromkeys(self._ranges, revision)
        self._tell(changes)

    def _apply(self, events: Iterable[pb.Event]) -> None:
        changes = []
        with self._lock:
            reached: dict[KeyRange, int] = {}
            for event in events:
                revision = event.kv.mod_revision
                key = decode_key(event.kv.key)
                lies_in = next((keys for keys in self._ranges if key in keys), None)
                if lies_in is None or revision <= self._revisions[lies_in]:
                    continue  # known from before the stream broke
                reached[lies_in] = revision
                if event.type == pb.Event.DELETE:
                    old = self._state.pop(key, None)
                    changes.append(Change(key, None, revision, old.create_revision if old is not None else 0))
                else:
                    kv = self._state[key] = KeyValue.of(event.kv)
                    changes.append(Change(key, kv.value, revision, kv.create_revision, kv.lease_id))
            self._revisions.update(reached)
        self._tell(tuple(changes))

    def _tell(self, changes: tuple[Change, ...]) -> None:
        if not changes or self._stopping.is_set():
            return
        try:
            self._on_changes(changes)
        except Exception:  # the owner's bug must not end the mirror, nor go unseen
            log.exception("bug: on_changes of the mirror of %s raised", self._name)

    def _tell_followed(self, on_followed: Callable[[], None]) -> None:
        if self._stopping.is_set():
            return
        try:
            on_followed()
        except Exception:  # as above
            log.exception("bug: on_followed of the mirror of %s raised", self._name)

    def _tell_connection(self, connected: bool) -> None:
        if connected == self._connected:
            return
        self._connected = connected
        if self._on_connection is None or self._stopping.is_set():
            return
        try:
            self._on_connection(connected)
        except Exception:  # as above
            log.exception("bug: on_connection of the mirror of %s raised", self._name)


class PrefixMirror(Mirror):
    """A mirror of all keys that start with `prefix`."""

    def __init__(
        self,
        store: Store,
        prefix: str,
        on_changes: Callable[[tuple[Change, ...]], None],
        on_connection: Callable[[bool], None] | None = None,
        silence_s: float = 1.0,
    ) -> None:
        super().__init__(store, [KeyRange.of_prefix(prefix)], on_changes, on_connection, silence_s)
