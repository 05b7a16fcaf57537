"""Starts a node's own Redis: the first process starts it through a keeper; the others use it.

The server listens on a Unix socket in the node's directory only, which this user alone can enter, and keeps nothing
on disk. The keeper (`redis_keeper`) ends it when the last user of the directory is gone, however that ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bagua_core.cache.errors import MissingPartError, StoreFault
from bagua_core.cache.node_directory import lock_within

START_WITHIN_S = 10.0
SOCKET, READY, LOG = "redis.sock", "redis-ready", "redis.log"
_ASK_EVERY_S = 0.02
_LONGEST_SOCKET_PATH = 107


def program() -> str:
    """Returns the path of redis-server or valkey-server. Raises MissingPartError."""
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found is None:
        raise MissingPartError(
            "backend='redis' without hosts starts redis-server on this node, and there is none on PATH; "
            "install it (apt-get install redis-server), name running servers in hosts=, or use backend='embedded'"
        )
    return found


def host(directory: Path, capacity_bytes: int, program: str) -> Path:
    """Returns the socket of this node's server, started if it is not there. directory: one that this process uses.

    Raises StoreFault if it does not answer in START_WITHIN_S, OSError.
    """
    if len(os.fsencode(directory / SOCKET)) > _LONGEST_SOCKET_PATH:
        raise StoreFault(
            "start", f"{directory / SOCKET} is too long for a Unix socket; choose a shorter directory="
        )
    lock = os.open(directory / "redis-start", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        lock_within(lock, START_WITHIN_S)
        if not (directory / READY).exists():
            _start(directory, capacity_bytes, program)
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
    return directory / SOCKET


def _start(directory: Path, capacity_bytes: int, program: str) -> None:
    keeper = subprocess.Popen(
        [
            sys.executable,
            "-S",
            "-E",
            str(Path(__file__).with_name("redis_keeper.py")),
            str(directory),
            program,
            str(capacity_bytes),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C in a terminal is for the script, which may still want its cache
        close_fds=True,
    )
    deadline = time.monotonic() + START_WITHIN_S
    while not (directory / READY).exists():
        if keeper.poll() is not None or time.monotonic() > deadline:
            keeper.kill()
            keeper.wait()
            raise StoreFault("start", f"redis-server did not start: {_last_words(directory)}")
        time.sleep(_ASK_EVERY_S)
    _unreaped.append(keeper)


# the keeper may outlive this process; kept, so that Popen does not warn of that
_unreaped: list[subprocess.Popen[bytes]] = []


def _last_words(directory: Path) -> str:
    try:
        lines = (directory / LOG).read_text(errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return lines[-1] if lines else "it said nothing"
