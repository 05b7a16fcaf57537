"""Lets a worker go on when the terminal that it prints to is closed: its output then leads nowhere.

Every write to such a terminal fails with EIO. A print in the script, or one of the runtime, would otherwise end a
worker that is about to leave at the next step boundary. A write between the hangup and the replacement still fails.
Processes of an ElasticDataLoader have a thread of their own for it; others that a script starts have none.
"""

from __future__ import annotations

import os
import select
import threading

STDOUT, STDERR = 1, 2


def discard_output_once_closed() -> None:
    """Starts a thread that waits for the end of the terminal behind stdout or stderr. Does nothing if neither is
    one."""
    terminals = {fd: os.fstat(fd) for fd in (STDOUT, STDERR) if os.isatty(fd)}
    if terminals:
        threading.Thread(target=_wait, args=(terminals,), name="bagua-terminal", daemon=True).start()


def _wait(terminals: dict[int, os.stat_result]) -> None:
    poll = select.poll()
    for fd in terminals:
        poll.register(fd, 0)  # a hangup is reported without being asked for
    while terminals:
        for fd, _ in poll.poll():
            poll.unregister(fd)
            terminal = terminals.pop(fd)
            if _leads_to(fd, terminal):
                nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
                os.dup2(nowhere, fd)
                os.close(nowhere)


def _leads_to(fd: int, terminal: os.stat_result) -> bool:
    """Tells whether the script has left the descriptor as it was: it may have put a log file there, or closed it."""
    try:
        return os.path.samestat(os.fstat(fd), terminal)
    except OSError:
        return False
