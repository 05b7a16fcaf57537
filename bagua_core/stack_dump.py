"""How does a worker show where its threads are, even while one of them holds the GIL?

Owns the worker's end: a real-time signal that faulthandler answers from C, and the anonymous file, opened in
advance, that it writes into. The agent finds both by the file's name, "bagua-stacks-<signal number>", among the
worker's descriptors. Knows neither agent nor job; imports the standard library only, for it runs before torch.
Invariant: nothing that a script uses is taken: no low descriptor, no signal that has a handler already.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal

CHANNEL_PREFIX = "bagua-stacks-"  # also in bagua_agent/workers/stacks.py
LEAST_DESCRIPTOR = 200  # scripts count on low numbers being free


def answer_stack_requests() -> int | None:
    """From now on the signal that is returned writes all threads' stacks; None if this system can't.

    Forked children inherit it together with the file. A stack dump is never worth failing a worker for.
    """
    # From the top: the lowest real-time signals are the ones that libraries take.
    for number in range(signal.SIGRTMAX - 3, signal.SIGRTMIN, -1):
        if signal.getsignal(number) is signal.SIG_DFL:
            break
    else:
        return None
    try:
        channel = _open_channel(f"{CHANNEL_PREFIX}{number}")
    except OSError:
        return None  # no memory files here, or no descriptor left
    faulthandler.register(number, file=channel, all_threads=True)
    return number


def _open_channel(name: str) -> int:
    low = os.memfd_create(name, os.MFD_CLOEXEC)
    # Children share the offset; appending keeps their answers apart all the same.
    fcntl.fcntl(low, fcntl.F_SETFL, os.O_APPEND)
    try:
        high = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, LEAST_DESCRIPTOR)
    except OSError:
        return low  # fewer descriptors are allowed than that
    os.close(low)
    return high
