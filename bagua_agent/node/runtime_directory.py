"""The 0700 directory of files that live no longer than the agent, and the names in it.

The agent removes it at its end; the guardian does if the agent could not. A host that loses its power, or a container
that is killed, leaves it: the next agent of the same account removes it. It holds nothing that a user wants to keep.

The owner holds a lock in it, by flock: unlike a process id it means the same in each container that shares the parent.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import tempfile
from io import BufferedRandom
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.endpoints import LONGEST_SOCKET_PATH_BYTES

LONGEST_NAME = "store/client:1"  # of a socket in it: etcd's, see etcd/server/embedded.py
PREFIX = "bagua-run-"
_OWNER = "owner"
_ANSWERS_WITHIN_S = 1.0


def make_runtime_directory(for_account: str | None = None) -> Path:
    """Makes a fresh directory whose path leaves room for the names of sockets. Raises UserError.

    for_account: the workers' account, if it is not the agent's own: then the job chooses TMPDIR, and the owner of the
    directory that it names could replace this one.
    """
    for parent in (None, "/tmp") if for_account is None else ("/tmp",):
        made = tempfile.mkdtemp(prefix=PREFIX, dir=parent)  # 0700: no other account reaches the sockets
        if len(os.fsencode(f"{made}/{LONGEST_NAME}")) <= LONGEST_SOCKET_PATH_BYTES:
            return Path(made)
        os.rmdir(made)
    raise UserError(f"TMPDIR {tempfile.gettempdir()!r} is too long for a socket's path; set a shorter one")


def session_socket(directory: Path) -> Path:
    return directory / "session.sock"


def store_directory(directory: Path) -> Path:
    """Returns the directory for the data of an etcd that this agent hosts."""
    return directory / "store"


def own(directory: Path) -> BufferedRandom:
    """Marks the directory as in use until the returned file is closed, which the end of the process does too."""
    draft = directory / f".{_OWNER}"
    file = os.fdopen(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b")
    fcntl.flock(file, fcntl.LOCK_EX)
    draft.rename(directory / _OWNER)  # under this name it is never without its lock while the owner lives
    return file


def remove_left(parent: Path) -> list[Path]:
    """Removes the directories in `parent` whose owners are gone and that belong to this account. Returns those."""
    removed = []
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            if _is_left(directory):
                removed.append(directory)
        except OSError:
            continue  # its owner, or another agent that starts, removes it at this moment
    return removed


def _is_left(directory: Path) -> bool:
    """Removes the directory if its owner is gone, and tells whether it did. Raises OSError."""
    with os.fdopen(os.open(directory / _OWNER, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not os.fstat(file.fileno()).st_nlink:
            return False  # another agent has removed it since it was opened
        # an etcd without its agent serves until it is killed
        if any(_answers(path) for path in directory.rglob("*") if path.is_socket()):
            return False
        shutil.rmtree(directory)
        return True


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(_ANSWERS_WITHIN_S)
        try:
            one.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # its process does not accept now
    return True
