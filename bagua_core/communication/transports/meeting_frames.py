"""Encodes the messages between a meeting store and its clients: length, operation, key, value."""

from __future__ import annotations

import socket
import struct
from enum import IntEnum

LARGEST_FRAME_BYTES = 1 << 20
_HEADER = struct.Struct("!IBH")  # bytes that follow, operation, length of the key


class Operation(IntEnum):
    """The kinds of messages. VALUE: the answer to a GET. FORGET: a key that no client asks for any more."""

    SET = 1
    GET = 2
    VALUE = 3
    FORGET = 4


def frame(operation: Operation, key: bytes, value: bytes = b"") -> bytes:
    return _HEADER.pack(len(key) + len(value), operation, len(key)) + key + value


class Connection:
    """One end of a connection: what has arrived and is no whole frame yet, and what is still to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = bytearray()
        self.outgoing = bytearray()
        self.questions = 0  # that wait for a value

    def frames(self) -> list[tuple[int, bytes, bytes]]:
        """Returns the whole frames received so far. Raises ValueError for one that is too large."""
        found = []
        while len(self.incoming) >= _HEADER.size:
            size, operation, key_size = _HEADER.unpack_from(self.incoming)
            if size > LARGEST_FRAME_BYTES or key_size > size:
                raise ValueError(f"a frame of {size} bytes")
            end = _HEADER.size + size
            if len(self.incoming) < end:
                break
            body = bytes(self.incoming[_HEADER.size : end])
            del self.incoming[:end]
            found.append((operation, body[:key_size], body[key_size:]))
        return found
