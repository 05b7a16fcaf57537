"""Hosts the stores of torch.distributed that no worker hosts: a small process beside the workers.

It is asked over its standard input, a socket of the agent: a length and JSON, answered alike. It opens a
TCPStore server of its own for every generation of a script that is restarted, and closes the old ones. It
ends when the agent closes the socket. Knows nothing of generations.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

LENGTH = struct.Struct("!I")
OPEN_TIMEOUT = timedelta(seconds=30)


class Stores:
    """The servers that are open, by their ports."""

    def __init__(self) -> None:
        self._by_port: dict[int, TCPStore] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request: {"open": port, "host": host} -> {"port": n}; {"drop": port} -> {"dropped": true or
        false}."""
        if "drop" in request:
            return {"dropped": self._by_port.pop(request["drop"], None) is not None}
        try:
            store = TCPStore(
                request["host"], request["open"], is_master=True, wait_for_workers=False, timeout=OPEN_TIMEOUT
            )
        except (RuntimeError, ValueError) as error:  # torch's network errors are RuntimeErrors
            return {"error": str(error).splitlines()[0]}
        self._by_port[store.port] = store
        return {"port": store.port}


def main() -> None:
    stores = Stores()
    with socket.socket(fileno=os.dup(0)) as agent, agent.makefile("rb") as requests:
        while len(head := requests.read(LENGTH.size)) == LENGTH.size:
            answer = json.dumps(stores.answer(json.loads(requests.read(*LENGTH.unpack(head))))).encode()
            agent.sendall(LENGTH.pack(len(answer)) + answer)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the agent is gone
