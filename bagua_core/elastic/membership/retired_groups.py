"""Destroys the Gloo groups of lost generations, with their connections and threads, when that is safe.

Owns letting go of groups that gloo.py retired. A destructor waits for operations that still run, so each group has a
thread of its own for it, which holds no lock of the interpreter meanwhile; the connections that close with one group
end what peers' groups still wait for. Invariant: only a group that no rank can use any more is let go.
"""

from __future__ import annotations

import threading

from bagua_core.communication.transports import gloo


def let_go() -> int:
    """Begin to destroy every retired group that no communicator and no operation's thread holds; how many.

    Cheap, never blocks. Whatever is still held is looked at again by the next call.
    """
    found = gloo.take_unused()
    count = len(found)
    while found:
        threading.Thread(
            target=lambda held: held.clear(), args=([found.pop()],), name="bagua-let-go", daemon=True
        ).start()
    return count
