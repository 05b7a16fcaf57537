"""A minimal gRPC client with which one process sends etcd the requests of thousands of agents.

grpc's own client takes more time for a request than etcd does for its answer. That does not matter for one agent, but
it would dominate a measurement of thousands in one process. This client sends uncompressed headers, respects etcd's
flow control, and does not read response headers: an answer without a message is an error.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SETTING = 4
_LARGEST_WINDOW = (1 << 31) - 1
_FIRST_WINDOW = 65535
_LARGEST_FRAME = 16384


class RequestFailed(Exception):
    """etcd answered without a message, or the connection ended."""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _text(value: bytes) -> bytes:
    assert len(value) < 127
    return bytes([len(value)]) + value


def _headers(method: str) -> bytes:
    """POST over plain HTTP; names of the static table by their numbers, nothing kept in the dynamic one."""
    return (
        b"\x83\x86"
        + b"\x04"
        + _text(method.encode())
        + b"\x01"
        + _text(b"localhost")
        + b"\x0f\x10"
        + _text(b"application/grpc")
        + b"\x00"
        + _text(b"te")
        + _text(b"trailers")
    )


class EtcdConnection(asyncio.Protocol):
    """One connection; many requests and streams at a time. Made by `connect`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._next_stream = 1
        self._window = _FIRST_WINDOW  # that etcd still takes on this connection
        self._unsent: deque[bytes] = deque()
        self._messages: dict[int, bytearray] = {}
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._tell: dict[int, Callable[[bytes], None]] = {}
        self._ended: Exception | None = None
        self._method_headers: dict[str, bytes] = {}

    @staticmethod
    async def connect(path: str) -> EtcdConnection:
        """path: of etcd's Unix socket."""
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_unix_connection(EtcdConnection, path)
        return connection

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def ask(self, method: str, request: bytes) -> asyncio.Future[bytes]:
        """The answer's message, to come. method: /package.Service/Method."""
        stream = self._open(method)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            future.set_exception(self._ended)
            return future
        self._answers[stream] = future
        self._send(stream, request, _END_STREAM)
        return future

    def stream(self, method: str, tell: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Open a bidirectional call: the returned function sends a message, and `tell` receives each arriving one."""
        stream = self._open(method)
        self._tell[stream] = tell
        return lambda request: self._send(stream, request, 0)

    # -- out

    def _open(self, method: str) -> int:
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        headers = self._method_headers.setdefault(method, _headers(method))
        self._messages[stream] = bytearray()
        assert self._transport is not None
        self._transport.write(_frame(_HEADERS, _END_HEADERS, stream, headers))
        return stream

    def _send(self, stream: int, message: bytes, flags: int) -> None:
        payload = b"\0" + struct.pack("!I", len(message)) + message
        assert len(payload) <= _LARGEST_FRAME
        self._unsent.append(_frame(_DATA, flags, stream, payload))
        self._send_what_may_go()

    def _send_what_may_go(self) -> None:
        # Of streams the windows are not counted: none sends as much as one holds but watches, which etcd reads at once.
        while self._unsent and self._window >= len(self._unsent[0]) - 9 and self._ended is None:
            frame = self._unsent.popleft()
            self._window -= len(frame) - 9
            assert self._transport is not None
            self._transport.write(frame)

    # -- in

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        settings = struct.pack("!HI", _INITIAL_WINDOW_SETTING, _LARGEST_WINDOW)
        more = struct.pack("!I", _LARGEST_WINDOW - _FIRST_WINDOW)
        transport.write(_PREFACE + _frame(_SETTINGS, 0, 0, settings) + _frame(_WINDOW_UPDATE, 0, 0, more))

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while len(received) - at >= 9:
            length = int.from_bytes(received[at : at + 3], "big")
            if len(received) - at < 9 + length:
                break
            kind, flags = received[at + 3], received[at + 4]
            stream = int.from_bytes(received[at + 5 : at + 9], "big") & _LARGEST_WINDOW
            self._take(kind, flags, stream, bytes(received[at + 9 : at + 9 + length]))
            at += 9 + length
        del received[:at]

    def connection_lost(self, error: Exception | None) -> None:
        self._end(RequestFailed(f"the connection to etcd ended: {error}"))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        assert self._transport is not None
        if kind == _DATA:
            self._take_data(stream, payload)
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            self._end_of(stream)
        elif kind == _SETTINGS and not flags & _ACK:
            self._transport.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._transport.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._send_what_may_go()
        elif kind == _RST_STREAM:
            self._end_of(stream)
        elif kind == _GOAWAY:
            self._end(RequestFailed(f"etcd sends us away: {payload[8:]!r}"))

    def _take_data(self, stream: int, payload: bytes) -> None:
        message = self._messages[stream]
        message += payload
        tell = self._tell.get(stream)
        if tell is None:
            return
        while len(message) >= 5:
            length = int.from_bytes(message[1:5], "big")
            if len(message) < 5 + length:
                return
            one = bytes(message[5 : 5 + length])
            del message[: 5 + length]
            tell(one)

    def _end_of(self, stream: int) -> None:
        message = self._messages.pop(stream, bytearray())
        answer = self._answers.pop(stream, None)
        if answer is None or answer.done():
            return
        if len(message) < 5:
            answer.set_exception(RequestFailed("etcd answered with an error"))
        else:
            answer.set_result(bytes(message[5:]))

    def _end(self, error: Exception) -> None:
        self._ended = self._ended or error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(self._ended)
        self._answers.clear()
