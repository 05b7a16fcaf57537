"""One tree of errors for launcher and agent, divided by who must act.

A message names the value and what to do next. UserError is a mistake of the user, PeerViolation means that another
process breaks the protocol, InfrastructureLost may recover by itself, InternalError is our bug.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class BaguaError(Exception):
    """The root of the tree; `exit_code` is what a command that ends with this error returns."""

    exit_code: ClassVar[int] = 1


class UserError(BaguaError):
    """Raised for a mistake of the user: a flag, a file, a value, a missing right."""

    exit_code: ClassVar[int] = 2


class PeerViolation(BaguaError):
    """Raised when another process sent what the protocol does not allow."""


class InfrastructureLost(BaguaError):
    """Raised when something outside the job is away or failed: network, store, disk."""


class StoreUnavailable(InfrastructureLost):
    """Raised if no etcd endpoint did what was asked in the time given; trying again later is harmless."""


class StoreFull(StoreUnavailable):
    """Raised when etcd refuses writes since its database is full: reads work, and it takes writes again once there is
    room."""


class OutcomeUnknown(InfrastructureLost):
    """Raised when a transaction or a command was sent and no answer came: it may have been done. Read before trying
    again."""


class LeaseLost(InfrastructureLost):
    """Raised when etcd does not know the lease (any more): its keys are gone."""


class JobReplaced(InfrastructureLost):
    """Raised when the store lost its keys and the others went on without this node; it can come again as a newcomer."""


class JobIsOver(BaguaError):
    """Raised when the job has its result and is not run again, so this agent has no part in it; result_code is the
    job's exit code."""

    def __init__(self, message: str, result_code: int) -> None:
        super().__init__(message)
        self.result_code = result_code


class InternalError(BaguaError):
    """Raised for our own bug: a state that must not be. Carries what is needed to find it."""


class OperationDiscarded(BaguaError):
    """Raised when an operation in the background was discarded before it began, because its owner ends."""


_PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EDQUOT,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ESTALE,
    }
)


def host_error(error: OSError, what: str, remedy: str) -> UserError | InfrastructureLost:
    """Returns the error to raise for `error`: a full disk or an exhausted limit may pass, the rest is the user's to
    mend.

    what: what can't be done. remedy: what the user can do about it.
    """
    said = f"{what}: {error.strerror or error}"
    if error.errno in _PASSING:
        return InfrastructureLost(f"{said}; the host has run out of something, see its disks and limits")
    return UserError(f"{said}; {remedy}")
