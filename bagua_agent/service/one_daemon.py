"""Keeps a second daemon from following the same node's orders: a lock on a file in the node's state directory.

The kernel gives the lock up with the process, however it ends; units that outlive the daemon do not hold it.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bagua_agent.base.errors import UserError, host_error

FILE_NAME = "daemon.lock"


@contextmanager
def only_daemon(state_directory: str) -> Iterator[None]:
    """Holds the lock of the state directory while the context is open. Raises UserError if another process holds it,
    UserError or InfrastructureLost if it can't be made or locked."""
    path = Path(state_directory) / FILE_NAME
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise host_error(error, f"cannot make {path}", "check directories.state") from error
    try:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by forks, unlike flock's
        except BlockingIOError:
            raise UserError(
                f"another daemon runs with {state_directory}; stop it first, or give this one its own directories.state"
            ) from None
        except OSError as error:
            remedy = (
                "put directories.state on a local file system, or on one with locks that this account may use"
            )
            raise host_error(error, f"cannot lock {path}", remedy) from error
        yield
    finally:
        os.close(descriptor)
