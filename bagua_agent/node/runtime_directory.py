"""The 0700 directory of files that live no longer than the agent, and the names in it.

The agent removes it at its end; the guardian does if the agent could not. It holds nothing that a user wants to keep.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.endpoints import LONGEST_SOCKET_PATH_BYTES

LONGEST_NAME = "store/client:1"  # of a socket in it: etcd's, see etcd/server/embedded.py


def make_runtime_directory(for_account: str | None = None) -> Path:
    """A fresh one, whose path leaves room for the names of sockets. Raises UserError.

    for_account: of the workers, if it is not the agent's own: then the job chooses TMPDIR, and the owner of the
    directory that it names could replace this one.
    """
    for parent in (None, "/tmp") if for_account is None else ("/tmp",):
        made = tempfile.mkdtemp(prefix="bagua-", dir=parent)  # 0700: no other account reaches the sockets
        if len(os.fsencode(f"{made}/{LONGEST_NAME}")) <= LONGEST_SOCKET_PATH_BYTES:
            return Path(made)
        os.rmdir(made)
    raise UserError(f"TMPDIR {tempfile.gettempdir()!r} is too long for a socket's path; set a shorter one")


def session_socket(directory: Path) -> Path:
    return directory / "session.sock"


def store_directory(directory: Path) -> Path:
    """For the data of an etcd that this agent hosts."""
    return directory / "store"
