"""One endpoint of etcd: its channel, and etcd3's client over it, with the token of the log-in (login.py).

Owns channel options and TLS. Does not know other endpoints or retries: an attempt either succeeds or raises
CallFailed, which says whether the request may have been done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.endpoints import Endpoint
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble, classify
from bagua_agent.etcd.login import Login, Metadata
from bagua_agent.etcd.stubs import RenewalStub, WatchStub, etcd3
from bagua_contract import etcd_pb2 as pb
from bagua_contract.grpc_channel import WITHOUT_PROBING, open_channel

T = TypeVar("T")

_CHANNEL_OPTIONS = (
    # Channels to one address share a connection by default; a new channel must not inherit a dead one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 2000),  # time given to one attempt to connect
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10000),  # etcd hangs up on clients that ping more than every 5 s
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    *WITHOUT_PROBING,
)
# etcd ends such a stream when its member has had no leader for three election timeouts. Without it, a member that lost
# its peers keeps a watch open for ever and answers its progress requests, while it learns of no change.
_REQUIRES_LEADER: Metadata = (("hasleader", "true"),)
_TOKEN_IS_OLD = (Trouble.TOKEN_REJECTED, Trouble.RIGHTS_CHANGED)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The endpoints of etcd and how to reach them. Paths are PEM files; user and password come together.

    request_timeout_s bounds an operation with all its attempts, unless it gives its own limit. attempt_timeout_s bounds
    one attempt at one endpoint, so a frozen one costs no more than that; attempts become longer, up to
    request_timeout_s, while no endpoint answers in time.
    """

    endpoints: tuple[Endpoint, ...]
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    request_timeout_s: float = 5.0
    attempt_timeout_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise UserError("no etcd endpoint is given; write for instance etcd-1:2379")
        if (self.cert is None) != (self.key is None):
            given = f"certificate {self.cert!r}" if self.key is None else f"key {self.key!r}"
            raise UserError(f"a client certificate needs both files, only the {given} is given")
        if (self.user is None) != (self.password is None):
            raise UserError(f"etcd user {self.user!r} and a password must be given together")
        for endpoint in self.endpoints:
            if endpoint.tls is False and not endpoint.is_unix and self.has_certificates:
                raise UserError(
                    f"certificates are given, but endpoint {str(endpoint)!r} is plain; write https://"
                )
        if self.request_timeout_s <= 0 or self.attempt_timeout_s <= 0:
            raise UserError(
                f"timeouts must be above 0, not {self.request_timeout_s} and {self.attempt_timeout_s} s"
            )

    @property
    def has_certificates(self) -> bool:
        return self.ca_cert is not None or self.cert is not None

    def uses_tls(self, endpoint: Endpoint) -> bool:
        return self.has_certificates if endpoint.tls is None else endpoint.tls


class EtcdClient(etcd3.Etcd3Client):  # type: ignore[misc]
    """etcd3's client over a channel of ours; timeout and token are set by call and thread (`limited`)."""

    def __init__(self, channel: grpc.Channel) -> None:
        # Not super().__init__(): that makes a channel of its own, to one host and port.
        self.channel = channel
        self.call_credentials = None  # the token travels as metadata, which plain channels carry too
        self.uses_secure_channel = False
        self.kvstub = etcd3.etcdrpc.KVStub(channel)
        self.clusterstub = etcd3.etcdrpc.ClusterStub(channel)
        self.leasestub = etcd3.etcdrpc.LeaseStub(channel)
        self.renewalstub = RenewalStub(channel)
        self.maintenancestub = etcd3.etcdrpc.MaintenanceStub(channel)
        self.transactions = etcd3.Transactions()
        self._limit = threading.local()

    @property
    def timeout(self) -> float | None:
        return getattr(self._limit, "timeout_s", None)

    @property
    def metadata(self) -> Metadata | None:
        return getattr(self._limit, "metadata", None)

    @contextmanager
    def limited(self, timeout_s: float, metadata: Metadata | None) -> Iterator[None]:
        self._limit.timeout_s, self._limit.metadata = timeout_s, metadata
        try:
            yield
        finally:
            self._limit.timeout_s = self._limit.metadata = None

    def raw(self, stub_method: Any, request: Any) -> Any:
        """Makes a call that etcd3 has no method for, or whose method hides part of the answer."""
        return stub_method(request, self.timeout, metadata=self.metadata)


class Connection:
    """A channel to one endpoint, logged in when needed. Thread-safe; ends with `close`."""

    def __init__(self, endpoint: Endpoint, config: StoreConfig, login: Login | None = None) -> None:
        """Opens the channel. login: shared by connections of one configuration; None: its own. Raises UserError if a
        certificate cannot be read."""
        self.endpoint = endpoint
        self._closed = False
        self._login = login or login_of(config)
        self._owns_login = login is None
        self._watches_with: Metadata | None = None  # token of the last watch
        self._channel = _channel(endpoint, config)
        self._client = EtcdClient(self._channel)
        self._watch = WatchStub(self._channel)

    def call(
        self, attempt: Callable[[EtcdClient], T], timeout_s: float, deadline_s: float | None = None
    ) -> T:
        """Calls `attempt` and returns its result. Raises CallFailed; takes at most timeout_s.

        deadline_s: of time.monotonic(); if given, log-in and attempt may take timeout_s each, until then.
        """
        if deadline_s is None:
            deadline_s = time.monotonic() + timeout_s
        metadata = self._log_in(min(timeout_s, deadline_s - time.monotonic()))
        try:
            return self._attempt(attempt, metadata, timeout_s, deadline_s)
        except CallFailed as error:
            if error.failure.trouble not in _TOKEN_IS_OLD or not self._login.forget(metadata):
                raise
        # etcd forgets tokens when it restarts and after a while, or its users changed
        metadata = self._log_in(min(timeout_s, deadline_s - time.monotonic()))
        return self._attempt(attempt, metadata, timeout_s, deadline_s)

    def watch(self, requests: Iterator[pb.WatchRequest], timeout_s: float) -> Any:
        """Returns a stream of WatchResponse, without time limit; it ends when the endpoint has no leader. Log-in before
        it takes at most timeout_s."""
        self._watches_with = self._log_in(timeout_s)
        with self._translated():
            return self._watch.Watch(requests, metadata=_REQUIRES_LEADER + (self._watches_with or ()))

    def forget_token(self) -> None:
        """Forgets the token of the last watch, so that the next call logs in again."""
        self._login.forget(self._watches_with)

    def close(self) -> None:
        """Closes the channel. Calls in flight end with CallFailed."""
        self._closed = True
        self._login.wake()
        if self._owns_login:
            self._login.cancel()
        self._channel.close()

    def _attempt(
        self,
        attempt: Callable[[EtcdClient], T],
        metadata: Metadata | None,
        timeout_s: float,
        deadline_s: float,
    ) -> T:
        left_s = max(0.001, min(timeout_s, deadline_s - time.monotonic()))
        with self._translated(), self._client.limited(left_s, metadata):
            return attempt(self._client)

    def _log_in(self, within_s: float) -> Metadata | None:
        return self._login.metadata(self.endpoint, within_s, lambda: self._closed)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise CallFailed(_failure_of(error)) from error
        except etcd3.Etcd3Exception as error:
            raise CallFailed(_failure_of(error.__context__)) from error
        except ValueError as error:
            if not self._closed:
                raise
            raise CallFailed(Failure(Trouble.NOT_SENT, "the connection was closed")) from error


def _failure_of(error: BaseException | None) -> Failure:
    if not isinstance(error, grpc.Call):  # etcd3 hides it behind its own exception, as its context
        return Failure(Trouble.MAYBE_DONE, repr(error))
    return classify(error.code(), error.details())


def login_of(config: StoreConfig) -> Login:
    return Login(config.user, config.password, lambda endpoint: _channel(endpoint, config))


def _channel(endpoint: Endpoint, config: StoreConfig) -> grpc.Channel:
    if not config.uses_tls(endpoint):
        return open_channel(endpoint.target, options=_CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(config.ca_cert, "CA certificate"),
        private_key=_read(config.key, "key"),
        certificate_chain=_read(config.cert, "certificate"),
    )
    return open_channel(endpoint.target, credentials, _CHANNEL_OPTIONS)


def _read(path: str | None, what: str) -> bytes | None:
    if path is None:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"etcd {what} {path!r} cannot be read: {error.strerror or error}") from error
    if b"-----BEGIN" not in data:
        raise UserError(f"etcd {what} {path!r} is not a PEM file")
    return data
