"""The keeper process of a node's own Redis: starts the server, and ends it when its users are gone.

    python redis_keeper.py DIRECTORY PROGRAM CAPACITY_BYTES

Every user holds a shared lock on DIRECTORY/users, and the kernel lets go of it however a user ends. The keeper waits
for that lock exclusively; when it has it, no user is left, and it ends the server and removes the directory. If the
keeper is killed the kernel ends the server. Imports nothing of the package: it is started in a moment and stays small.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_ANSWER_WITHIN_S = 9.0
_END_WITHIN_S = 5.0


def main(directory: Path, program: str, capacity_bytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)

    def end_with_keeper() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    users = os.open(directory / "users", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    path = directory / "redis.sock"
    path.unlink(missing_ok=True)
    server = subprocess.Popen(
        [
            program,
            *("--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700"),
            *("--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(directory)),
            *("--maxmemory", str(capacity_bytes), "--maxmemory-policy", "noeviction"),
            *("--logfile", str(directory / "redis.log"), "--loglevel", "warning"),
        ],
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_keeper,
    )
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    if not _answers(path, server):
        server.kill()
        server.wait()
        return 1
    (directory / "redis-ready").touch(mode=0o600)
    threading.Thread(target=_end_after_users, args=(users, server), daemon=True).start()
    server.wait()
    (directory / "redis-ready").unlink(missing_ok=True)  # the next process that comes may start another
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 1  # the server ended by itself, and there are users
    _remove(directory)
    return 0


def _end_after_users(users: int, server: subprocess.Popen[bytes]) -> None:
    fcntl.flock(users, fcntl.LOCK_EX)  # as long as there are users: that is this process's life
    server.terminate()
    try:
        server.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        server.kill()


def _remove(directory: Path) -> None:
    away = directory.with_name(f".removed-{directory.name}-{os.getpid()}")
    try:
        directory.rename(away)
    except FileNotFoundError:
        return  # the last user, or another's sweep, has done it
    shutil.rmtree(away, ignore_errors=True)
    try:
        directory.parent.rmdir()
    except OSError:
        return  # there are others


def _answers(path: Path, server: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + _ANSWER_WITHIN_S
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(1.0)
            try:
                asking.connect(str(path))
                asking.sendall(b"PING\r\n")
                if asking.recv(16).startswith(b"+PONG"):
                    return True
            except OSError:
                time.sleep(0.01)
    return False


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
