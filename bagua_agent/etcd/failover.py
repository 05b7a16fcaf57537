"""Sends requests to the etcd endpoint that answers, and goes on to the next where one does not.

Owns the connections, one for each endpoint in use, and what an error of etcd means to the caller. Requests are repeated
until their time is up; one that may not be repeated ends in OutcomeUnknown.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
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
from bagua_agent.etcd.connection import Connection, EtcdClient, StoreConfig, login_of
from bagua_agent.etcd.endpoints import Endpoint
from bagua_agent.etcd.failures import UNKNOWN_NAME, CallFailed, Failure, Trouble
from bagua_agent.etcd.login import log_in_of
from bagua_agent.etcd.patience import Patience

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = (
    "refuses writes: its database is full (NOSPACE); compact and defragment it or raise --quota-backend-bytes, "
    "then `etcdctl alarm disarm`"
)

_FIRST_BACKOFF_S = 0.02
_LONGEST_BACKOFF_S = 0.5


class Failover:
    """Calls etcd at an endpoint that answers. Thread-safe."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._login = login_of(config)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._is_full = False  # as the last write found it
        self._current = 0  # index of the endpoint in use
        # Where commits are slow, reads and renewals are still answered at once: they tell nothing of writes.
        self._patience = {is_write: self._new_patience() for is_write in (False, True)}
        self._connections: dict[int, _Shared] = {}

    @property
    def endpoint(self) -> str:
        """The endpoint in use: the one that answered last, or the next to be tried."""
        return str(self.config.endpoints[self._current])

    def close(self) -> None:
        """Ends everything in flight in other threads with StoreUnavailable."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections.values())
            self._connections.clear()
        for shared in connections:
            shared.connection.close()
        self._login.cancel()

    def connection(self, endpoint: Endpoint) -> Connection:
        """Returns a connection of the caller's own, with the log-in of the others. Raises UserError as Connection
        does."""
        return Connection(endpoint, self.config, self._login)

    def call(
        self,
        operation: str,
        attempt: Callable[[EtcdClient], T],
        timeout_s: float | None,
        repeatable: bool = True,
        denied_is_fine: bool = False,
        is_write: bool = False,
    ) -> T:
        """Calls `attempt` on an endpoint that answers. repeatable: it is sent again after an attempt that got no
        answer. is_write: etcd commits it before it answers. Raises CallFailed where `attempt` names a revision that is
        gone."""
        patience = self._patience[is_write]
        limit_s = self.config.request_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        reasons: dict[int, str] = {}
        failed_since_pause = pauses = 0
        while True:
            shared = self._borrow(operation)
            began_s = time.monotonic()
            attempt_s = min(patience.limit_s, max(0.001, deadline - began_s))
            try:
                answer = shared.connection.call(attempt, attempt_s, deadline)
            except CallFailed as error:
                failure = error.failure
                if denied_is_fine and failure.trouble is Trouble.DENIED:
                    return None  # type: ignore[return-value]  # connect: someone is there
                self._raise_if_final(operation, shared, failure, error)
                if not repeatable and not failure.certainly_not_done and not self._closed.is_set():
                    self._fail_over(shared, failure, patience, began_s)
                    raise OutcomeUnknown(
                        f"{operation}: no answer from etcd at {shared.connection.endpoint} "
                        f"({failure.detail}); it may have been done"
                    ) from error
                if failure.is_timeout:  # says less than an earlier reason
                    reasons.setdefault(shared.index, f"no answer within {attempt_s:.3g} s")
                else:
                    reasons[shared.index] = failure.detail
                self._fail_over(shared, failure, patience, began_s)
            else:
                self._answered(shared, patience, time.monotonic() - began_s)
                return answer
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
        """Raises the error of trouble that another attempt or endpoint does not mend."""
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
            case Trouble.HISTORY_GONE:
                raise cause  # only the caller knows what the revision was for
            case Trouble.REFUSED:
                raise InternalError(f"{operation}: {where} refuses it: {failure.detail}") from cause

    def _found_full(self, full: str) -> None:
        """Logs a full database once: all that wait for it try again and again."""
        with self._lock:
            first, self._is_full = not self._is_full, True
        if first:
            log.error("%s; it is tried again until then", full)

    def wrote(self) -> None:
        """Notes that a write which a full etcd refuses was done."""
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
            f"{operation}: no etcd endpoint answered within {limit_s:g} s ({each}). "
            f"{_next_move(reasons.values(), log_in_of(self.config.user))}"
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
                shared = _Shared(self._current, self.connection(endpoint))
                self._connections[self._current] = shared
            shared.users += 1
            return shared

    def _give_back(self, shared: _Shared) -> None:
        with self._lock:
            shared.users -= 1
            unused = shared.retired and shared.users == 0
        if unused:
            shared.connection.close()

    def _new_patience(self) -> Patience:
        first_s = self.config.attempt_timeout_s
        return Patience(first_s, max(first_s, self.config.request_timeout_s), len(self.config.endpoints))

    def _answered(self, shared: _Shared, patience: Patience, took_s: float) -> None:
        """Notes an answer, and retires connections to other endpoints than the one in use."""
        with self._lock:
            patience.answered(took_s)
            shared.has_answered = True
            others = [each for each in self._connections.values() if each.index != self._current]
            unused = [other for other in others if other.users == 0]
            for other in others:
                self._retire(other)
        for other in unused:
            other.connection.close()

    def _fail_over(self, shared: _Shared, failure: Failure, patience: Patience, began_s: float) -> None:
        """Goes on to the next endpoint, and retires a connection that failed. It serves no new call: after a silent cut
        it would stay broken for minutes. Other threads' calls on it run to their end.

        One that has never answered is kept for a while: the look-up of the endpoint's name, or the handshake, may take
        longer than an attempt, and would begin anew.
        """
        with self._lock:
            now_s = time.monotonic()
            if failure.is_timeout:
                patience.timed_out(began_s, now_s)
            if self._connections.get(shared.index) is not shared:
                return
            if self._current == shared.index:
                self._current = (shared.index + 1) % len(self.config.endpoints)
            may_connect_yet = now_s - shared.opened_s < self.config.request_timeout_s
            if not (failure.is_timeout and may_connect_yet and not shared.has_answered):
                self._retire(shared)

    def _retire(self, shared: _Shared) -> None:
        """Takes a connection out of use; the last call on it closes it. The lock is held."""
        del self._connections[shared.index]
        shared.retired = True


def _next_move(reasons: Collection[str], log_in: str) -> str:
    if reasons and all(reason == UNKNOWN_NAME for reason in reasons):
        return "Check the endpoint's spelling, and this host's DNS"
    if any("handshake failed" in reason.lower() for reason in reasons):
        return (
            "Check that etcd's certificate and this client's are of one authority, that neither has expired or was "
            "revoked, and that a client's is given if etcd asks for one"
        )
    if any(log_in in reason for reason in reasons):
        return (
            "A log-in costs etcd about 0.1 s of a processor, so many at once take longer; they go on and are repeated. "
            "If it stays so, give etcd more processors, or the agents certificates"
        )
    return "Check that etcd runs there and that this host reaches it"


@dataclass(slots=True, eq=False)
class _Shared:
    """A connection and the number of calls that run on it."""

    index: int
    connection: Connection
    opened_s: float = field(default_factory=time.monotonic)
    users: int = 0
    has_answered: bool = False
    retired: bool = False
