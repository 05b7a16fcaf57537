"""Classifies failed calls to etcd by gRPC's status codes and etcd's messages. Pure.

The distinction that matters is whether the request may have been done: a request that must not be done twice may be
sent again only if it certainly was not done.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import grpc

from bagua_agent.base.errors import InfrastructureLost

LONGEST_DETAIL = 300


class Trouble(Enum):
    NOT_SENT = auto()  # the endpoint is away; the request never reached it
    MAYBE_DONE = auto()  # no answer, or an error that came after the request was accepted
    BUSY = auto()  # etcd declined for now
    TOKEN_REJECTED = auto()  # authenticate again
    # etcd's users or roles changed under the request: send it again, with a new token if any
    RIGHTS_CHANGED = auto()
    LOGIN_REJECTED = auto()  # wrong user or password
    DENIED = auto()  # no right to this key
    LEASE_GONE = auto()
    HISTORY_GONE = auto()  # the revision asked for was compacted, or this store never had it
    FULL = auto()  # the disk quota is used up: etcd serves reads only
    NOT_ETCD = auto()  # something else answers there
    REFUSED = auto()  # etcd says that the request itself is wrong


@dataclass(frozen=True, slots=True)
class Failure:
    trouble: Trouble
    detail: str
    is_timeout: bool = False

    @property
    def certainly_not_done(self) -> bool:
        return self.trouble is not Trouble.MAYBE_DONE


class CallFailed(InfrastructureLost):
    """Raised when one attempt at one endpoint failed. Stays inside the store package."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


_NEVER_SENT = (
    "failed to connect",  # covers refused connections, missing sockets, handshakes of TLS that failed
    "connections to all backends failing",
    *(_UNKNOWN_NAMES := ("name resolution", "dns resolution failed", "errors resolving")),
    "handshake failed",
)
UNKNOWN_NAME = "its name can't be resolved"
_REMOTE_HOST = "failed to connect to remote host: "
_TOKEN = ("invalid auth token", "user name is empty")
# the latter from older versions
_RIGHTS_CHANGED = ("revision of auth store is old", "revision in header is old")


def classify(code: grpc.StatusCode, details: str | None) -> Failure:
    """Returns the meaning of a failed call; `details` is the message that came with `code`."""
    text = " ".join((details or "").split())
    return Failure(
        _trouble(code, text.lower()),
        _detail(text)[:LONGEST_DETAIL] or code.name.lower().replace("_", " "),
        is_timeout=code is grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def _detail(text: str) -> str:
    """Shortens gRPC's words for an endpoint that can't be connected to, to the cause."""
    lower = text.lower()
    if any(sign in lower for sign in _UNKNOWN_NAMES):
        return UNKNOWN_NAME
    return lower.rpartition(_REMOTE_HOST)[2] if _REMOTE_HOST in lower else text


def _trouble(code: grpc.StatusCode, text: str) -> Trouble:
    if any(sign in text for sign in _TOKEN):
        return Trouble.TOKEN_REJECTED
    if any(sign in text for sign in _RIGHTS_CHANGED):
        return Trouble.RIGHTS_CHANGED
    if "lease not found" in text:
        return Trouble.LEASE_GONE
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            # "no leader" is said before a proposal is made
            sent = not any(sign in text for sign in _NEVER_SENT) and "no leader" not in text
            return Trouble.MAYBE_DONE if sent else Trouble.NOT_SENT
        case grpc.StatusCode.OUT_OF_RANGE:
            return Trouble.HISTORY_GONE
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Trouble.FULL if "space" in text else Trouble.BUSY
        case grpc.StatusCode.UNAUTHENTICATED:
            return Trouble.TOKEN_REJECTED
        case grpc.StatusCode.PERMISSION_DENIED:
            return Trouble.DENIED
        case grpc.StatusCode.UNIMPLEMENTED:
            return Trouble.NOT_ETCD
        case grpc.StatusCode.INVALID_ARGUMENT if "authentication failed" in text:
            return Trouble.LOGIN_REJECTED
        case (
            grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.FAILED_PRECONDITION | grpc.StatusCode.NOT_FOUND
        ):
            return Trouble.REFUSED
        case _:
            # DEADLINE_EXCEEDED, CANCELLED (the connection was closed under the call), INTERNAL, UNKNOWN, ...
            return Trouble.MAYBE_DONE
