"""Adopts the child processes of an ended parent while a worker is handed over to the agent.

The agent is a subreaper only for those moments, so that processes that a script leaves behind go to their usual parent.
Processes that arrive by chance, or because the agent is process 1 of a container, are reaped here.
Invariant: no child that the agent started itself is ever reaped here.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bagua_agent.workers.process.process_status import all_stat_fields

PR_SET_CHILD_SUBREAPER = 36

_lock = threading.Lock()
_adopting = 0


@contextmanager
def adopting() -> Iterator[None]:
    """Makes orphans among this process's descendants its children within the block. May be nested and used by many
    threads."""
    global _adopting
    with _lock:
        _adopting += 1
        if _adopting == 1:
            _set_subreaper(True)
    try:
        yield
    finally:
        with _lock:
            _adopting -= 1
            if _adopting == 0:
                _set_subreaper(False)


def _set_subreaper(on: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def is_orphan(pid: int, session: int, own_session: int) -> bool:
    """Tells whether our child `pid` was not started by us, judged by its session.

    What we start stays in our session or leads one of its own, and so does a worker handed over to us; only a worker's
    descendants are in another's.
    """
    return session not in (pid, own_session)


def reap_orphans() -> list[int]:
    """Reaps the zombies among adopted orphans and returns their ids. Costs one system call when there is no zombie."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return []
    except ChildProcessError:
        return []
    own_session = os.getsid(0)
    reaped = []
    for pid, session in _zombie_children():
        if is_orphan(pid, session, own_session):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # another thread was here
            reaped.append(pid)
    return reaped


def _zombie_children() -> Iterator[tuple[int, int]]:
    own_pid = os.getpid()
    for pid, fields in all_stat_fields():
        if fields[0] == "Z" and int(fields[1]) == own_pid:
            yield pid, int(fields[3])
