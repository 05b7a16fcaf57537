"""Keeps the Gloo groups of lost generations, and destroys them, with their connections and threads, when that is safe.

A destructor that meets a pending operation blocks until that operation's timeout, so each group has a thread of its own
for it, which holds no lock of the interpreter meanwhile; the connections that close with one group end what peers'
groups still wait for. Invariant: only a group that no rank can use any more is let go.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

_retired: list[Any] = []  # groups whose operations may still run
_taking = threading.Lock()


def retire(group: Any) -> None:
    """Keeps a group in which something may still run."""
    _retired.append(group)


def any_retired() -> bool:
    """Tells whether this process must end with os._exit."""
    return bool(_retired)


def let_go() -> int:
    """Begins to destroy every retired group that no communicator and no operation's thread holds; returns how many.

    Cheap, never blocks. Whatever is still held is checked again by the next call.
    """
    found: list[Any] = []
    # measured: versions of Python count a call's own references differently
    unused = _references([object()], 0)
    with _taking:  # others only append, so indices stay
        for index in range(len(_retired) - 1, -1, -1):
            if _references(_retired, index) == unused:
                found.append(_retired.pop(index))
    count = len(found)
    while found:
        threading.Thread(
            target=lambda held: held.clear(), args=([found.pop()],), name="bagua-let-go", daemon=True
        ).start()
    return count


def _references(groups: list[Any], index: int) -> int:
    """Returns the references to that group: the list's, others', and those of this call that the interpreter counts."""
    return sys.getrefcount(groups[index])
