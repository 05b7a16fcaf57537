"""A TCP port of 127.0.0.1 that nothing else takes between its choice and its use.

A port that the kernel chooses (bind to 0) is one of those that it gives to any outgoing connection as well: between the
choice and a server's start another lane of the suite may have it. These lie below that range
(net.ipv4.ip_local_port_range begins at 32768), and each lane has its own.
"""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _LANES, _EACH = 20000, 12, 1000
_numbers = itertools.count(os.getpid() % _EACH)  # another run on this machine begins elsewhere


def free_port() -> int:
    lane = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_numbers, _EACH):
        port = _FIRST + lane % _LANES * _EACH + number % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue  # in use
        return port
    raise RuntimeError(
        f"all ports of lane {lane} are in use: {_EACH} from {_FIRST + lane % _LANES * _EACH} on"
    )
