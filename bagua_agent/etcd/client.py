"""A thread-safe client of etcd over all endpoints.

Idempotent requests are repeated until their time is up (failover.py), a transaction is not (OutcomeUnknown: read, then
decide). Does not know jobs, watches or the owners of leases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bagua_agent.base.errors import InternalError, LeaseLost, StoreUnavailable
from bagua_agent.etcd import paged_read
from bagua_agent.etcd.connection import Connection, EtcdClient, StoreConfig
from bagua_agent.etcd.endpoints import Endpoint
from bagua_agent.etcd.failover import Failover
from bagua_agent.etcd.failures import CallFailed, Trouble
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

MOST_OPERATIONS_IN_A_TRANSACTION = 128  # etcd's --max-txn-ops

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
    """The outcome of a transaction. succeeded: all comparisons held and everything was done. revision: of the store at
    that moment."""

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    lease_id: int
    ttl_s: int


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """The answer to the renewal of a lease. ttl_s is 0 if etcd does not know the lease. revision: of the store."""

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
    """Requires that the key is as written at `revision`; 0 says that there is no such key."""
    return Compare(key, "MOD", revision)


def create_revision_is(key: str, revision: int) -> Compare:
    return Compare(key, "CREATE", revision)


def absent(key: str) -> Compare:
    return Compare(key, "CREATE", 0)


def none_below(prefix: str) -> Compare:
    """Requires that there is no key that starts with `prefix`."""
    return Compare(prefix, "CREATE", 0, whole_prefix=True)


def lease_is(key: str, lease_id: int) -> Compare:
    return Compare(key, "LEASE", lease_id)


def value_is(key: str, value: bytes) -> Compare:
    return Compare(key, "VALUE", value)


def read_ranges(
    connection: Connection, ranges: Sequence[KeyRange], page_s: float
) -> tuple[list[KeyValue], int]:
    """Returns all keys in the ranges as they were at one revision, and that revision. page_s: the limit of each
    request. Raises CallFailed."""
    found, revision = paged_read.read_ranges(lambda attempt: connection.call(attempt, page_s), ranges)
    return [KeyValue.of(kv) for kv in found], revision


def read_at(
    connection: Connection, keys: KeyRange, revision: int, page_s: float
) -> tuple[list[KeyValue], int]:
    """Returns the keys of the range as they were at `revision`, and the newest revision of the store. page_s: as above.
    Raises CallFailed, with HISTORY_GONE if the store does not have that revision."""
    found, newest = paged_read.read_at(lambda attempt: connection.call(attempt, page_s), keys, revision)
    return [KeyValue.of(kv) for kv in found], newest


class Store:
    """A client of etcd's keys, leases and transactions. Thread-safe. Every method takes at most timeout_s (default: the
    configuration's request_timeout_s; of a read of ranges, for each page) and raises StoreUnavailable naming the
    endpoints, or UserError if etcd refuses the user."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._failover = Failover(config)
        self._repeat = self._failover.call  # of what may be done more than once
        self._repeat_write = partial(self._failover.call, is_write=True)

    @property
    def endpoint(self) -> str:
        """The endpoint in use: the one that answered last, or the next to be tried."""
        return self._failover.endpoint

    def connect(self, timeout_s: float) -> None:
        """Returns once some endpoint answers. Raises StoreUnavailable naming the endpoints and why."""
        # linearizable, so that an endpoint without a quorum does not count
        self._repeat("connect", lambda c: c.get_response(_PROBE_KEY), timeout_s, denied_is_fine=True)

    def close(self) -> None:
        """Ends everything in flight in other threads with StoreUnavailable."""
        self._failover.close()

    def connection(self, endpoint: Endpoint) -> Connection:
        """Returns a connection to this endpoint alone, with this store's log-in; the caller closes it."""
        return self._failover.connection(endpoint)

    # ---- keys

    def get(self, key: str, timeout_s: float | None = None) -> KeyValue | None:
        answer = self._repeat(f"get {key}", lambda c: c.get_response(encode_key(key)), timeout_s)
        return KeyValue.of(answer.kvs[0]) if answer.kvs else None

    def get_prefix(self, prefix: str, timeout_s: float | None = None) -> tuple[list[KeyValue], int]:
        """Returns the keys that start with `prefix`, in key order, and the revision at which they are so."""
        return self.get_ranges([KeyRange.of_prefix(prefix)], timeout_s)

    def get_ranges(
        self, ranges: Sequence[KeyRange], timeout_s: float | None = None
    ) -> tuple[list[KeyValue], int]:
        """Returns the keys in all of the ranges as of one revision, and that revision.

        timeout_s: of all pages together; None: each page has the configuration's request_timeout_s, since a range may
        be of any size.
        """
        what = f"get {', '.join(map(str, ranges))}"
        until_s = None if timeout_s is None else time.monotonic() + timeout_s

        def ask(attempt: Callable[[EtcdClient], Any]) -> Any:
            left_s = None if until_s is None else max(0.001, until_s - time.monotonic())
            return self._repeat(what, attempt, left_s)

        try:
            found, revision = paged_read.read_ranges(ask, ranges)
        except CallFailed as error:
            raise StoreUnavailable(
                f"{what}: etcd was compacted again and again while it was read ({error})"
            ) from error
        return [KeyValue.of(kv) for kv in found], revision

    def get_and_count(
        self, keys: Sequence[str], prefix: str, timeout_s: float | None = None
    ) -> tuple[dict[str, KeyValue], int]:
        """Returns those of `keys` that are there, and how many keys start with `prefix`; one request, one revision."""
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
        """Writes the key and returns the revision of the write. May be done more than once. Raises LeaseLost."""
        answer = self._repeat_write(
            f"put {key}", lambda c: c.put(encode_key(key), value, lease=lease_id or None), timeout_s
        )
        self._failover.wrote()
        return int(answer.header.revision)

    def delete(self, key: str, timeout_s: float | None = None) -> bool:
        """Deletes the key and returns whether it was there; after an attempt that got no answer, whether it was there
        since."""
        answer = self._repeat_write(
            f"delete {key}", lambda c: c.delete(encode_key(key), return_response=True), timeout_s
        )
        return bool(answer.deleted)

    def delete_prefix(self, prefix: str, timeout_s: float | None = None) -> int:
        """Deletes the keys that start with `prefix` and returns how many it removed; see `delete`."""
        end_of_prefix(prefix)
        answer = self._repeat_write(
            f"delete {prefix}*", lambda c: c.delete_prefix(encode_key(prefix)), timeout_s
        )
        return int(answer.deleted)

    def delete_range(self, keys: KeyRange, timeout_s: float | None = None) -> int:
        """Deletes the keys of the range and returns how many it removed; see `delete`."""
        request = etcd3.etcdrpc.DeleteRangeRequest(key=keys.start, range_end=keys.end)
        answer = self._repeat_write(
            f"delete {keys}", lambda c: c.raw(c.kvstub.DeleteRange, request), timeout_s
        )
        return int(answer.deleted)

    def transact(
        self,
        compares: Sequence[Compare] = (),
        puts: Sequence[Put] = (),
        deletes: Sequence[str] = (),
        timeout_s: float | None = None,
        delete_ranges: Sequence[KeyRange] = (),
        repeatable: bool = False,
    ) -> Transaction:
        """Does all of puts and deletes if all comparisons hold, else nothing. Sent again only if it certainly
        was not done, or if it is repeatable. delete_ranges: one operation each, however many keys lie in them.

        repeatable: it does no harm twice, and the caller takes an answer that no longer succeeds, since an earlier
        attempt was done, for no failure.

        Raises LeaseLost, and OutcomeUnknown where it is not repeatable.
        """
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
        answer = self._failover.call(f"transaction on {keys}", attempt, timeout_s, repeatable, is_write=True)
        self._failover.wrote()
        return answer

    # ---- leases

    def lease_grant(self, ttl_s: int, timeout_s: float | None = None) -> LeaseGrant:
        """Grants a new lease; etcd may grant more than ttl_s. An attempt without answer leaves one that ends."""
        lease = self._repeat_write("grant a lease", lambda c: c.lease(ttl_s), timeout_s)
        self._failover.wrote()
        return LeaseGrant(lease.id, lease.ttl)

    def lease_revoke(self, lease_id: int, timeout_s: float | None = None) -> None:
        """Ends the lease. It and its keys are gone afterwards, whether or not it was there."""
        try:
            self._repeat_write("revoke a lease", lambda c: c.revoke_lease(lease_id), timeout_s)
        except LeaseLost:
            return  # it had ended, or an earlier attempt did it

    def lease_keepalive_once(self, lease_id: int, timeout_s: float | None = None) -> KeepAlive:
        request = pb.LeaseKeepAliveRequest(ID=lease_id)
        answer = self._repeat(
            "keep a lease", lambda c: c.raw(c.renewalstub.LeaseKeepAlive, request), timeout_s
        )
        if answer is None:
            raise StoreUnavailable(f"etcd ended the renewal of lease {lease_id:x} without an answer")
        return KeepAlive(max(0, answer.TTL), answer.header.revision)

    def lease_keys(self, lease_id: int, timeout_s: float | None = None) -> frozenset[str]:
        """Returns the keys that hang on the lease. Raises LeaseLost."""
        answer = self._repeat("read a lease", lambda c: c.get_lease_info(lease_id), timeout_s)
        if answer.TTL < 0:  # 0 is a lease in its last second
            raise LeaseLost(f"etcd does not know lease {lease_id:x}")
        return frozenset(decode_key(key) for key in answer.keys)

    # ---- the server

    def status(self, timeout_s: float | None = None) -> StoreStatus:
        """Returns the status of the endpoint in use."""

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
        """Lets etcd forget what keys held before `revision`. Harmless if any client has done it already."""
        request = etcd3.etcdrpc.CompactionRequest(revision=revision)
        try:
            self._repeat_write(
                f"compact to revision {revision}", lambda c: c.raw(c.kvstub.Compact, request), timeout_s
            )
        except CallFailed as error:
            if error.failure.trouble is not Trouble.HISTORY_GONE:
                raise

    def member_names(self, timeout_s: float | None = None) -> frozenset[str]:
        return self._repeat("list members", lambda c: frozenset(m.name for m in c.members), timeout_s)


_COMPARED_FIELD = {"MOD": "mod_revision", "CREATE": "create_revision", "LEASE": "lease", "VALUE": "value"}
