"""A thread-safe client of etcd over all endpoints.

Owns failover between endpoints and retries: idempotent requests are repeated until their time is up, a transaction is
not (OutcomeUnknown: read, then decide). Does not know jobs, watches or the owners of leases.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import (
    InternalError,
    LeaseLost,
    OutcomeUnknown,
    StoreFull,
    StoreUnavailable,
    UserError,
)
from bagua_agent.etcd.connection import Connection, EtcdClient, StoreConfig
from bagua_agent.etcd.failures import UNKNOWN_NAME, CallFailed, Failure, Trouble
from bagua_agent.etcd.key_range import KeyRange, decode_key, encode_key, end_of_prefix
from bagua_agent.etcd.read_at_once import read_at_once
from bagua_agent.etcd.stubs import etcd3
from bagua_contract import etcd_pb2 as pb

__all__ = [
    "Compare",
    "KeepAlive",
    "KeyValue",
    "LeaseGrant",
    "Put",
    "Store",
    "StoreConfig",
    "StoreStatus",
    "Transaction",
    "absent",
    "create_revision_is",
    "lease_is",
    "mod_revision_is",
    "value_is",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_OPERATIONS_IN_A_TRANSACTION = 128  # etcd's --max-txn-ops

FULL = (
    "refuses writes: its database is full (NOSPACE); compact and defragment it or raise --quota-backend-bytes, "
    "then `etcdctl alarm disarm`"
)

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5
_PROBE_KEY = "/bagua/v1/is-anyone-there"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as etcd has it. create_revision stays while the key lives; lease_id is 0 for none."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int = 1
    lease_id: int = 0

    @staticmethod
    def of(kv: pb.KeyValue) -> KeyValue:
        return KeyValue(
            key=decode_key(kv.key),
            value=kv.value,
            create_revision=kv.create_revision,
            mod_revision=kv.mod_revision,
            version=kv.version,
            lease_id=kv.lease,
        )


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Transaction:
    """succeeded: all comparisons held and everything was done. revision: of the store at that moment."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    lease_id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """ttl_s is 0 if etcd does not know the lease. revision: of the store."""

    ttl_s: int
    revision: int


@dataclass(frozen=True, slots=True)
class StoreStatus:
    endpoint: str
    version: str
    db_size_bytes: int
    has_leader: bool
    revision: int
    is_full: bool = False


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction; made by the functions below."""

    key: str
    target: str  # of pb.Compare.CompareTarget
    expected: int | bytes
    whole_prefix: bool = False  # it holds for every key that starts with `key`


def mod_revision_is(key: str, revision: int) -> Compare:
    """The key is as written at `revision`; 0 says that there is no such key."""
    return Compare(key, "MOD", revision)


def create_revision_is(key: str, revision: int) -> Compare:
    return Compare(key, "CREATE", revision)


def absent(key: str) -> Compare:
    return Compare(key, "CREATE", 0)


def none_below(prefix: str) -> Compare:
    """There is no key that starts with `prefix`."""
    return Compare(prefix, "CREATE", 0, whole_prefix=True)


def lease_is(key: str, lease_id: int) -> Compare:
    return Compare(key, "LEASE", lease_id)


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "VALUE", value)


def read_ranges(
    connection: Connection, ranges: Sequence[KeyRange], timeout_s: float
) -> tuple[list[KeyValue], int]:
    """All keys in the ranges as they were at one revision, and that revision. Raises CallFailed."""

    def read(client: EtcdClient) -> tuple[list[KeyValue], int]:
        return _read_ranges(client, ranges)

    return connection.call(read, timeout_s)


def _read_ranges(client: EtcdClient, ranges: Sequence[KeyRange]) -> tuple[list[KeyValue], int]:
    reads = [etcd3.etcdrpc.RangeRequest(key=keys.start, range_end=keys.end) for keys in ranges]
    answers, revision = read_at_once(client, reads)
    return [KeyValue.of(kv) for one in answers for kv in one.kvs], revision


class Store:
    """etcd's keys, leases and transactions. Thread-safe. Every method takes at most timeout_s (default: the
    configuration's request_timeout_s) and raises StoreUnavailable naming the endpoints, or UserError if etcd
    refuses the user."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._is_full = False  # as the last write found it
        self._current = 0  # index of the endpoint in use
        self._connections: dict[int, _Shared] = {}

    @property
    def endpoint(self) -> str:
        """The endpoint in use: the one that answered last, or the next to be tried."""
        return str(self.config.endpoints[self._current])

    def connect(self, timeout_s: float) -> None:
        """Returns once some endpoint answers. Raises StoreUnavailable naming the endpoints and why."""
        # linearizable, so that an endpoint without a quorum does not count
        self._repeat("connect", lambda c: c.get_response(_PROBE_KEY), timeout_s, denied_is_fine=True)

    def close(self) -> None:
        """Ends everything in flight in other threads with StoreUnavailable."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections.values())
            self._connections.clear()
        for shared in connections:
            shared.connection.close()

    # ---- keys

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        answer = self._repeat(f"get {key}", lambda c: c.get_response(encode_key(key)), timeout_s)
        return KeyValue.of(answer.kvs[0]) if answer.kvs else None

    def get_prefix(self, prefix: str, timeout_s: float | None = None) -> tuple[list[KeyValue], int]:
        """Keys that start with `prefix`, in key order, and the revision at which they are so."""
        end_of_prefix(prefix)
        answer = self._repeat(
            f"get {prefix}*",
            lambda c: c.get_prefix_response(encode_key(prefix), sort_order="ascend"),
            timeout_s,
        )
        return [KeyValue.of(kv) for kv in answer.kvs], answer.header.revision

    def get_ranges(
        self, ranges: Sequence[KeyRange], timeout_s: float | None = None
    ) -> tuple[list[KeyValue], int]:
        """The keys in all of them as of one revision, and that revision."""
        return self._repeat(
            f"get {', '.join(map(str, ranges))}", lambda c: _read_ranges(c, ranges), timeout_s
        )

    def get_and_count(
        self, keys: Sequence[str], prefix: str, timeout_s: float | None = None
    ) -> tuple[dict[str, KeyValue], int]:
        """Those of `keys` that are there, and how many keys start with `prefix`; one request, one revision."""
        rpc = etcd3.etcdrpc
        below, end = encode_key(prefix), end_of_prefix(prefix)
        what = f"get {', '.join(keys)}, count {prefix}*"

        def attempt(client: EtcdClient) -> tuple[dict[str, KeyValue], int]:
            reads = [rpc.RangeRequest(key=encode_key(key)) for key in keys]
            reads.append(rpc.RangeRequest(key=below, range_end=end, count_only=True))
            (*read, count), _ = read_at_once(client, reads)
            found = [KeyValue.of(kv) for one in read for kv in one.kvs]
            return {kv.key: kv for kv in found}, int(count.count)

        return self._repeat(what, attempt, timeout_s)

    def put(self, key: str, value: bytes, lease_id: int = 0, timeout_s: float | None = None) -> int:
        """Revision of the write. May be done more than once. Raises LeaseLost."""
        answer = self._repeat(
            f"put {key}", lambda c: c.put(encode_key(key), value, lease=lease_id or None), timeout_s
        )
        self._wrote()
        return int(answer.header.revision)

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """Whether it was there; after an attempt that got no answer, whether it was there since."""
        answer = self._repeat(
            f"delete {key}", lambda c: c.delete(encode_key(key), return_response=True), timeout_s
        )
        return bool(answer.deleted)

    def delete_prefix(self, prefix: str, timeout_s: float | None = None) -> int:
        """How many keys it removed; see `delete`."""
        end_of_prefix(prefix)
        answer = self._repeat(f"delete {prefix}*", lambda c: c.delete_prefix(encode_key(prefix)), timeout_s)
        return int(answer.deleted)

    def delete_range(self, keys: KeyRange, timeout_s: float | None = None) -> int:
        """How many keys it removed; see `delete`."""
        request = etcd3.etcdrpc.DeleteRangeRequest(key=keys.start, range_end=keys.end)
        answer = self._repeat(f"delete {keys}", lambda c: c.raw(c.kvstub.DeleteRange, request), timeout_s)
        return int(answer.deleted)

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
    ) -> Transaction:
        """Does all of puts and deletes if all comparisons hold, else nothing. Sent again only if it certainly
        was not done. delete_ranges: one operation each, however many keys lie in them. Raises OutcomeUnknown,
        LeaseLost."""
        operations = len(puts) + len(deletes) + len(delete_ranges)
        if max(len(compares), operations) > MOST_OPERATIONS_IN_A_TRANSACTION:
            raise InternalError(f"a transaction of {operations} operations; split it")

        def attempt(client: EtcdClient) -> Transaction:
            rpc = etcd3.etcdrpc
            request = rpc.TxnRequest()
            for compare in compares:
                message = request.compare.add()
                message.key = encode_key(compare.key)
                if compare.whole_prefix:
                    message.range_end = KeyRange.of_prefix(compare.key).end
                message.result = rpc.Compare.EQUAL
                message.target = rpc.Compare.CompareTarget.Value(compare.target)
                setattr(message, _COMPARED_FIELD[compare.target], compare.expected)
            for put in puts:
                operation = request.success.add().request_put
                operation.key, operation.value = encode_key(put.key), put.value
                operation.lease = put.lease_id
            for key in deletes:
                request.success.add().request_delete_range.key = encode_key(key)
            for keys in delete_ranges:
                removed = request.success.add().request_delete_range
                removed.key, removed.range_end = keys.start, keys.end
            answer = client.raw(client.kvstub.Txn, request)
            return Transaction(answer.succeeded, answer.header.revision)

        keys = ", ".join(sorted({*(p.key for p in puts), *deletes, *map(str, delete_ranges)}))
        answer = self._call(f"transaction on {keys}", attempt, timeout_s, repeatable=False)
        self._wrote()
        return answer

    # ---- leases

    def lease_grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseGrant:
        """A new lease; etcd may grant more than ttl_s. An attempt without answer leaves one that ends."""
        lease = self._repeat("grant a lease", lambda c: c.lease(ttl_s), timeout_s)
        self._wrote()
        return LeaseGrant(lease.id, lease.ttl)

    def lease_revoke(self, lease_id: int, timeout_s: float | None = None) -> None:
        """The lease and its keys are gone afterwards, whether or not it was there."""
        try:
            self._repeat("revoke a lease", lambda c: c.revoke_lease(lease_id), timeout_s)
        except LeaseLost:
            return  # it had ended, or an earlier attempt did it

    def lease_keepalive_once(self, lease_id: int, timeout_s: float | None = None) -> KeepAlive:
        # The stream is read to its end, so that nothing of it stays behind.
        answers = self._repeat("keep a lease", lambda c: list(c.refresh_lease(lease_id)), timeout_s)
        if not answers:
            raise StoreUnavailable(f"etcd ended the renewal of lease {lease_id:x} without an answer")
        return KeepAlive(max(0, answers[-1].TTL), answers[-1].header.revision)

    def lease_keys(self, lease_id: int, timeout_s: float | None = None) -> frozenset[str]:
        """Keys that hang on the lease. Raises LeaseLost."""
        answer = self._repeat("read a lease", lambda c: c.get_lease_info(lease_id), timeout_s)
        if answer.TTL < 0:  # 0 is a lease in its last second
            raise LeaseLost(f"etcd does not know lease {lease_id:x}")
        return frozenset(decode_key(key) for key in answer.keys)

    # ---- the server

    def status(self, timeout_s: float | None = None) -> StoreStatus:
        """Of the endpoint in use."""

        def attempt(client: EtcdClient) -> StoreStatus:
            answer = client.raw(client.maintenancestub.Status, etcd3.etcdrpc.StatusRequest())
            return StoreStatus(
                endpoint=self.endpoint,
                version=answer.version,
                db_size_bytes=answer.dbSize,
                has_leader=answer.leader != 0,
                revision=answer.header.revision,
                is_full=any("NOSPACE" in error for error in answer.errors),
            )

        return self._repeat("status", attempt, timeout_s)

    def compact(self, revision: int, timeout_s: float | None = None) -> None:
        """Let etcd forget what keys held before `revision`. Harmless if any client has done it already."""
        request = etcd3.etcdrpc.CompactionRequest(revision=revision)
        try:
            self._repeat(
                f"compact to revision {revision}", lambda c: c.raw(c.kvstub.Compact, request), timeout_s
            )
        except InternalError as error:
            cause = error.__cause__
            if not (isinstance(cause, CallFailed) and cause.failure.trouble is Trouble.HISTORY_GONE):
                raise

    def member_names(self, timeout_s: float | None = None) -> frozenset[str]:
        return self._repeat("list members", lambda c: frozenset(m.name for m in c.members), timeout_s)

    # ---- failing over

    def _repeat(
        self,
        operation: str,
        attempt: Callable[[EtcdClient], T],
        timeout_s: float | None,
        denied_is_fine: bool = False,
    ) -> T:
        return self._call(operation, attempt, timeout_s, repeatable=True, denied_is_fine=denied_is_fine)

    def _call(
        self,
        operation: str,
        attempt: Callable[[EtcdClient], T],
        timeout_s: float | None,
        repeatable: bool,
        denied_is_fine: bool = False,
    ) -> T:
        limit_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        reasons: dict[int, str] = {}
        failed_since_pause = pauses = 0
        while True:
            shared = self._borrow(operation)
            attempt_s = min(self.config.attempt_timeout_s, max(0.001, deadline - time.monotonic()))
            try:
                return shared.connection.call(attempt, attempt_s)
            except CallFailed as error:
                failure = error.failure
                if denied_is_fine and failure.trouble is Trouble.DENIED:
                    return None  # type: ignore[return-value]  # connect: someone is there
                self._raise_if_final(operation, shared, failure, error)
                if not repeatable and not failure.certainly_not_done and not self._closed.is_set():
                    self._fail_over(shared)
                    raise OutcomeUnknown(
                        f"{operation}: no answer from etcd at {shared.connection.endpoint} "
                        f"({failure.detail}); it may have been done"
                    ) from error
                if failure.is_timeout:  # says less than an earlier reason
                    reasons.setdefault(shared.index, f"no answer within {attempt_s:g} s")
                else:
                    reasons[shared.index] = failure.detail
                self._fail_over(shared)
            finally:
                self._give_back(shared)
            failed_since_pause += 1
            if failed_since_pause >= len(self.config.endpoints):
                failed_since_pause = 0
                pauses += 1
                pause_s = delay_s(pauses, _FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
                self._closed.wait(min(pause_s, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                raise self._unavailable(operation, limit_s, reasons)

    def _raise_if_final(self, operation: str, shared: _Shared, failure: Failure, cause: CallFailed) -> None:
        """Trouble that another attempt or endpoint does not mend."""
        where = f"etcd at {shared.connection.endpoint}"
        match failure.trouble:
            case Trouble.LEASE_GONE:
                raise LeaseLost(f"{operation}: {where} does not know the lease") from cause
            case Trouble.LOGIN_REJECTED:
                raise UserError(
                    f"{where} refuses user {self.config.user!r} ({failure.detail}); check user and password"
                ) from cause
            case Trouble.TOKEN_REJECTED if self.config.user is None:
                raise UserError(f"{where} asks for a log-in; give a user and a password") from cause
            case Trouble.DENIED:
                raise UserError(
                    f"{operation}: {where} denies it to {self._who()} ({failure.detail}); run "
                    f"`bagua-agent certs etcd-users`, or grant its role /bagua/v1/ and /bagua/secrets/v1/ with "
                    f"`etcdctl role grant-permission --prefix=true`"
                ) from cause
            case Trouble.FULL:
                full = f"{where} {FULL}"
                self._found_full(full)
                raise StoreFull(f"{operation}: {full}") from cause
            case Trouble.NOT_ETCD:
                raise UserError(f"{where} does not speak etcd's v3 protocol ({failure.detail})") from cause
            case Trouble.REFUSED | Trouble.HISTORY_GONE:
                raise InternalError(f"{operation}: {where} refuses it: {failure.detail}") from cause

    def _found_full(self, full: str) -> None:
        """Said once: all who wait for it try again and again."""
        with self._lock:
            first, self._is_full = not self._is_full, True
        if first:
            log.error("%s; it is tried again until then", full)

    def _wrote(self) -> None:
        """Something that a full etcd refuses was done."""
        if self._is_full:
            with self._lock:
                was_full, self._is_full = self._is_full, False
            if was_full:
                log.warning("etcd takes writes again")

    def _unavailable(self, operation: str, limit_s: float, reasons: dict[int, str]) -> StoreUnavailable:
        each = "; ".join(f"{self.config.endpoints[i]}: {reason}" for i, reason in sorted(reasons.items()))
        untried = [str(e) for i, e in enumerate(self.config.endpoints) if i not in reasons]
        if untried:
            each += f"; not tried in time: {', '.join(untried)}"
        return StoreUnavailable(
            f"{operation}: no etcd endpoint answered within {limit_s:g} s ({each}). {_next_move(reasons.values())}"
        )

    def _who(self) -> str:
        if self.config.user is not None or self.config.cert is None:
            return f"user {self.config.user!r}"
        return f"the holder of certificate {self.config.cert!r}"

    def _borrow(self, operation: str) -> _Shared:
        with self._lock:
            if self._closed.is_set():
                raise StoreUnavailable(f"{operation}: the connection to etcd was closed by this process")
            shared = self._connections.get(self._current)
            if shared is None:
                endpoint = self.config.endpoints[self._current]
                shared = _Shared(self._current, Connection(endpoint, self.config))
                self._connections[self._current] = shared
            shared.users += 1
            return shared

    def _give_back(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            unused = shared.retired and shared.users == 0
        if unused:
            shared.connection.close()

    def _fail_over(self, shared: _Shared) -> None:
        """A connection that failed serves no new call: after a silent cut it would stay broken for minutes.
        Other threads' calls on it run to their end."""
        with self._lock:
            if self._connections.get(shared.index) is shared:
                del self._connections[shared.index]
                shared.retired = True
                if self._current == shared.index:
                    self._current = (shared.index + 1) % len(self.config.endpoints)


def _next_move(reasons: Collection[str]) -> str:
    if reasons and all(reason == UNKNOWN_NAME for reason in reasons):
        return "Check the endpoint's spelling, and this host's DNS"
    if any("handshake failed" in reason.lower() for reason in reasons):
        return (
            "Check that etcd's certificate and this client's are of one authority, that neither has expired or was "
            "revoked, and that a client's is given if etcd asks for one"
        )
    return "Check that etcd runs there and that this host reaches it"


@dataclass(slots=True, eq=False)
class _Shared:
    """A connection and how many calls run on it."""

    index: int
    connection: Connection
    users: int = 0
    retired: bool = False


_COMPARED_FIELD = {"MOD": "mod_revision", "CREATE": "create_revision", "LEASE": "lease", "VALUE": "value"}
