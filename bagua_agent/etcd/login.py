"""The log-in of a user and password: one token for all connections to one etcd.

etcd compares a password by bcrypt, about 0.1 s of one of its processors. Agents that log in together therefore wait
longer than for other requests. A log-in has a limit of its own and goes on when its callers' time is up; the next
caller waits for the same one. After a log-in without an answer there is a pause, drawn at random and longer each time.
Any member of etcd takes a token that another one has given. Does not know requests or fail-over.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import UserError
from bagua_agent.etcd.endpoints import Endpoint
from bagua_agent.etcd.failures import CallFailed, Failure, Trouble, classify
from bagua_agent.etcd.stubs import AuthStub
from bagua_contract import etcd_pb2 as pb

LIMIT_S = 10.0
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _Try:
    """A log-in under way. failure: of one that is over and gave no token."""

    channel: grpc.Channel
    is_over: bool = False
    failure: Failure | None = None


@dataclass(slots=True)
class _Member:
    """The state of the log-ins at one endpoint. silent: those without an answer since the last one with one."""

    under_way: _Try | None = None
    silent: int = 0
    not_before_s: float = field(default=float("-inf"))


class Login:
    """Holds the token of one user. Thread-safe."""

    def __init__(
        self, user: str | None, password: str | None, open_channel: Callable[[Endpoint], grpc.Channel]
    ) -> None:
        """Takes the user and password; logs in nowhere yet. user: None if no log-in is needed. open_channel: raises
        UserError if a certificate can't be read."""
        self._user = user
        self._password = password
        self._open_channel = open_channel
        self._changed = threading.Condition()
        self._is_in = user is None
        self._metadata: Metadata | None = None
        self._members: dict[Endpoint, _Member] = {}

    def metadata(self, endpoint: Endpoint, within_s: float, is_closed: Callable[[], bool]) -> Metadata | None:
        """Returns what each request carries; None if etcd asks for no log-in.

        Logs in at `endpoint` first if there is no token. Raises CallFailed, of a request that was not sent, after
        within_s, once is_closed is true (see `wake`), or if etcd refuses the user.
        """
        deadline_s = time.monotonic() + within_s
        with self._changed:
            while not self._is_in:
                member = self._members.setdefault(endpoint, _Member())
                self._await_pause(member, deadline_s, is_closed)
                if self._is_in:
                    break
                one = member.under_way or self._begin(endpoint, member)
                left_s = deadline_s - time.monotonic()
                self._changed.wait_for(lambda one=one: self._is_in or one.is_over or is_closed(), left_s)  # type: ignore[misc]
                if self._is_in:
                    break
                if one.failure is not None:
                    raise CallFailed(one.failure)
                self._refuse(is_closed(), f"has no answer after {within_s:.3g} s")
            return self._metadata

    def forget(self, metadata: Metadata | None) -> bool:
        """Drops a token that etcd does not take any more; has no effect if there is a newer one. Returns False if there
        is no log-in."""
        if self._user is None:
            return False
        with self._changed:
            if metadata == self._metadata:
                self._is_in, self._metadata = False, None
        return True

    def wake(self) -> None:
        """Makes callers evaluate their is_closed again."""
        with self._changed:
            self._changed.notify_all()

    def cancel(self) -> None:
        """Ends log-ins under way; their callers get CallFailed."""
        with self._changed:
            under_way = [member.under_way for member in self._members.values() if member.under_way]
        for one in under_way:
            one.channel.close()

    # ---- the lock is held in the following

    def _await_pause(self, member: _Member, deadline_s: float, is_closed: Callable[[], bool]) -> None:
        """Returns at the end of the pause, or once there is a token or a log-in under way."""
        while (
            member.under_way is None
            and not self._is_in
            and (pause_s := member.not_before_s - time.monotonic()) > 0
        ):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or is_closed():
                self._refuse(is_closed(), f"had no answer within {LIMIT_S:g} s and is sent again soon")
            self._changed.wait(min(pause_s, left_s))

    def _refuse(self, is_closed: bool, why: str) -> None:
        detail = "the connection was closed" if is_closed else f"{log_in_of(self._user)} {why}"
        raise CallFailed(Failure(Trouble.NOT_SENT, detail))

    def _begin(self, endpoint: Endpoint, member: _Member) -> _Try:
        try:
            one = _Try(self._open_channel(endpoint))
        except UserError as error:  # a certificate that was readable before
            raise CallFailed(Failure(Trouble.NOT_SENT, str(error))) from error
        thread = background_thread(
            "etcd-login", lambda: self._log_in(one), lambda end: self._over(member, one, end)
        )
        thread.start()
        member.under_way = one
        return one

    # ---- the thread of a log-in

    def _log_in(self, one: _Try) -> Metadata | None:
        request = pb.AuthenticateRequest(name=self._user, password=self._password)
        try:
            return (("token", AuthStub(one.channel).Authenticate(request, timeout=LIMIT_S).token),)
        except grpc.RpcError as error:
            failure = classify(error.code(), error.details())
            if "authentication is not enabled" in failure.detail:
                return None  # as etcd's own client does: go on without a token
            raise CallFailed(failure) from error
        except ValueError as error:  # gRPC's word for a channel that was closed
            raise CallFailed(Failure(Trouble.NOT_SENT, "the connection was closed")) from error

    def _over(self, member: _Member, one: _Try, end: OperationEnd[Metadata | None]) -> None:
        with self._changed:
            one.is_over, member.under_way = True, None
            if isinstance(end, Failed):
                one.failure = self._failure_of(end)
                if isinstance(end.error, CallFailed) and end.error.failure.is_timeout:
                    member.silent += 1
                    pause_s = delay_s(member.silent, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                    member.not_before_s = time.monotonic() + pause_s * random.uniform(0.5, 1.5)
            else:
                member.silent = 0
                self._is_in, self._metadata = True, end.value
            self._changed.notify_all()
        one.channel.close()

    def _failure_of(self, end: Failed) -> Failure:
        if not isinstance(end.error, CallFailed):
            return Failure(Trouble.NOT_SENT, f"{log_in_of(self._user)} failed: {end.reason}")
        failure = end.error.failure
        if failure.is_timeout:
            return Failure(Trouble.NOT_SENT, f"{log_in_of(self._user)} had no answer within {LIMIT_S:g} s")
        if failure.trouble is Trouble.MAYBE_DONE:  # logging in changes nothing
            return Failure(Trouble.NOT_SENT, failure.detail)
        return failure


def log_in_of(user: str | None) -> str:
    return f"the log-in of user {user!r}"
