"""Requests to a helper process: a length, JSON, and file descriptors beside the first bytes; all bounded.

One end of a socket pair. Does not know the requests' meaning. One request at a time: its owner holds a lock.
"""

from __future__ import annotations

import array
import json
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any

from bagua_agent.base.errors import InfrastructureLost

LENGTH = struct.Struct("!I")
MAX_ANSWER_BYTES = 1 << 20


class HelperGone(InfrastructureLost):
    """Raised if the helper ended, or did not answer in time; what it did with the last request is unknown."""


class RequestSocket:
    """Our end of the socket pair. Every call raises HelperGone when the other end is closed or the time is over."""

    def __init__(self, own_end: socket.socket) -> None:
        self._socket = own_end

    @staticmethod
    def pair() -> tuple[RequestSocket, socket.socket]:
        """Makes a pair: our end, and the one for the helper; neither is inherited by accident."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return RequestSocket(own), other

    def ask(self, request: dict[str, Any], descriptors: Sequence[int], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        self._send(request, descriptors, deadline)
        return self.receive(deadline - time.monotonic())

    def send(self, request: dict[str, Any], descriptors: Sequence[int], timeout_s: float) -> None:
        """Sends a request that is answered later, or not at all."""
        self._send(request, descriptors, time.monotonic() + timeout_s)

    def _send(self, request: dict[str, Any], descriptors: Sequence[int], deadline: float) -> None:
        body = json.dumps(request).encode()
        data = memoryview(LENGTH.pack(len(body)) + body)
        beside = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        )
        while data:
            self._bound(deadline)
            try:
                sent = self._socket.sendmsg([data], beside)
            except OSError as error:
                raise HelperGone(f"request not sent: {error}") from error
            data, beside = data[sent:], []

    def receive(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size, deadline))
        if size > MAX_ANSWER_BYTES:
            raise HelperGone(f"an answer of {size} bytes")
        try:
            answer = json.loads(self._exactly(size, deadline))
        except (ValueError, RecursionError) as error:
            raise HelperGone("an answer that is no JSON") from error
        if not isinstance(answer, dict):
            raise HelperGone(f"an answer that is {type(answer).__name__}, not an object")
        return answer

    def _exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._bound(deadline)
            try:
                part = self._socket.recv(size - len(data))
            except OSError as error:
                raise HelperGone(f"no answer: {error}") from error
            if not part:
                raise HelperGone("it has ended")
            data += part
        return bytes(data)

    def _bound(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise HelperGone("no answer in time")
        self._socket.settimeout(remaining_s)

    def fileno(self) -> int:
        """Returns the descriptor, by which a caller can wait for an answer."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
