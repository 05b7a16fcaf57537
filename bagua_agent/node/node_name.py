"""Names a node in its job: the host's name, and a number for each further agent of the same job on that host.

The number is held by an abstract Unix socket, which the kernel frees when the agent ends, however it ends. Such sockets
belong to a network namespace, as a host does.
"""

from __future__ import annotations

import errno
import hashlib
import socket

MOST_AGENTS = 64  # of a job on one host that get names of their own


def hold_name(host_name: str, job_id: str) -> tuple[str, socket.socket | None]:
    """Returns the name of this agent's node, and the object that holds the name until it is closed; None if no socket
    could be bound."""
    job = hashlib.sha256(job_id.encode()).hexdigest()[:32]
    for number in range(1, MOST_AGENTS + 1):
        holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            holder.bind(f"\0bagua-node-{job}-{number}")
        except OSError as problem:
            holder.close()
            if problem.errno != errno.EADDRINUSE:
                break  # a name that others may have too is better than no job
        else:
            return (host_name if number == 1 else f"{host_name}-{number}"), holder
    return host_name, None
