"""A relay that records what passes between clients and a server, and the pings among the frames of HTTP/2.

The caller gives the sockets, which are of TCP or Unix sockets.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_BYTES = 65536
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD_BYTES, _SETTINGS, _PING, _ACK = 9, 4, 6, 1
_INITIAL_WINDOW, _SETTING_BYTES = 4, 6


def frames(stream: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields type, flags and content of each whole frame of one direction of a connection. Pure."""
    at = len(_PREFACE) if stream.startswith(_PREFACE) else 0
    while at + _HEAD_BYTES <= len(stream):
        begin, size = at + _HEAD_BYTES, int.from_bytes(stream[at : at + 3], "big")
        yield stream[at + 3], stream[at + 4], stream[begin : begin + size]
        at = begin + size


def pings(stream: bytes) -> int:
    """Returns how many pings were sent; answers to the other side's are none. Pure."""
    return sum(kind == _PING and not flags & _ACK for kind, flags, _ in frames(stream))


def window_bytes(stream: bytes) -> int:
    """Returns how much this side takes on a new stream before it has read it, as it says first. Pure."""
    settings = next(content for kind, _, content in frames(stream) if kind == _SETTINGS)
    pairs = (settings[at : at + _SETTING_BYTES] for at in range(0, len(settings), _SETTING_BYTES))
    return {int.from_bytes(p[:2], "big"): int.from_bytes(p[2:], "big") for p in pairs}[_INITIAL_WINDOW]


class RecordedRelay:
    """From construction to `end`. listener: where clients connect. connect: to the server."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._name = listener.getsockname()
        self._sockets = [listener]
        self.asked: list[bytearray] = []  # of the clients, by connection
        self.answered: list[bytearray] = []  # of the server
        self._start(self._accept, listener)

    @property
    def port(self) -> int:
        """Of a TCP listener."""
        return int(self._name[1])

    def end(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):  # an end that is not connected any more
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="recorded-relay", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ended
            while True:
                client, server = listener.accept()[0], self._connect()
                self._sockets += [client, server]
                self.asked.append(bytearray())
                self.answered.append(bytearray())
                self._start(self._pass_on, client, server, self.asked[-1])
                self._start(self._pass_on, server, client, self.answered[-1])

    def _pass_on(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        with contextlib.suppress(OSError):  # either side broke
            while data := source.recv(_BYTES):
                record += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
