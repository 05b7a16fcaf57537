"""What a process has opened since a moment: descriptors and threads, by identity and not by number.

A test process holds what earlier tests left, such as connections of a gRPC server that is being shut down. These are
closed at any time, so two counts differ although the test itself left nothing, and a leak could hide behind them.
"""

from __future__ import annotations

import os
import threading
from collections import Counter


def open_descriptors(pid: int | None = None) -> Counter[str]:
    """What the descriptors of a process refer to (`socket:[123]`, a path), and how often.

    The numbers are left out: the same file may be opened again under another one. pid: of this process if None.
    """
    directory = f"/proc/{pid or 'self'}/fd"
    found = Counter[str]()
    for name in os.listdir(directory):
        try:
            found[os.readlink(f"{directory}/{name}")] += 1
        except FileNotFoundError:
            continue  # the listing's own, or one that another thread has closed
    return found


def opened_since(before: Counter[str], pid: int | None = None) -> Counter[str]:
    """The descriptors that are open now and were not at `before`, a value of `open_descriptors`."""
    return open_descriptors(pid) - before


def started_since(before: set[threading.Thread]) -> set[threading.Thread]:
    """The threads of this process that run now and are not in `before`, a set of `threading.enumerate()`."""
    return set(threading.enumerate()) - before
