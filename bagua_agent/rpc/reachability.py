"""Touches agents: finds out whether the kernel of an agent's host accepts a connection to the agent's port, which costs
no call.

Says less than a probe (control_client.py): a frozen agent still accepts. A refusal or silence is a reason to probe, no
proof.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Mapping
from enum import Enum

from bagua_agent.rpc.control_client import endpoint_of
from bagua_contract.addresses import family_of

_UNDER_WAY = {0, errno.EINPROGRESS}
_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET}
_SILENT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH}


class Reachability(Enum):
    ANSWERED = "answered"
    REFUSED = "refused"
    SILENT = "silent"


def reach_all(addresses: Mapping[str, str], timeout_s: float) -> dict[str, Reachability]:
    """Touches all agents at once; takes timeout_s at most. addresses: agent -> control address. An agent whose touch
    has no outcome is absent: its address is none, this host has no descriptor left, or this process was frozen
    meanwhile."""
    began_s = time.monotonic()
    found: dict[str, Reachability] = {}
    under_way: dict[int, tuple[str, socket.socket]] = {}
    poll = select.poll()
    try:
        for agent_id, address in addresses.items():
            opened = _begin(address)
            if opened is None:
                continue
            connection, error = opened
            under_way[connection.fileno()] = (agent_id, connection)
            if error in _UNDER_WAY:
                poll.register(connection, select.POLLOUT)
            elif (touch := _meaning(error)) is not None:
                found[agent_id] = touch
        awaited = {fd for fd, (agent_id, _) in under_way.items() if agent_id not in found}
        while awaited and (left_s := began_s + timeout_s - time.monotonic()) > 0:
            for fd, _ in poll.poll(left_s * 1000):
                poll.unregister(fd)
                awaited.discard(fd)
                agent_id, connection = under_way[fd]
                error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if (touch := _meaning(error)) is not None:
                    found[agent_id] = touch
        if time.monotonic() - began_s <= 2 * timeout_s:
            found |= {under_way[fd][0]: Reachability.SILENT for fd in awaited}
    finally:
        for _, connection in under_way.values():
            connection.close()
    return found


def _begin(address: str) -> tuple[socket.socket, int] | None:
    endpoint = endpoint_of(address)
    if endpoint is None:
        return None
    try:
        connection = socket.socket(family_of(endpoint[0]), socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:
        return None
    try:
        return connection, connection.connect_ex(endpoint)
    except OSError:  # an interface that this host does not have
        connection.close()
        return None


def _meaning(error: int) -> Reachability | None:
    if error == 0:
        return Reachability.ANSWERED
    if error in _REFUSED:
        return Reachability.REFUSED
    return Reachability.SILENT if error in _SILENT else None
