"""Provides a signal that any member of a generation gives once and all others check without waiting.

Owns a connection to the generation's meeting store. A signal has a number, and numbers only grow. Each member that
watches a number asks the store for its key; the first `give` answers all of them. Old numbers are forgotten, given or
not. Nothing blocks but the connecting and the sending of some bytes, for a bounded time. The signal is a hint: a member
that does not get it does what it would do without.
"""

from __future__ import annotations

import socket

from bagua_core.communication.transports.meeting_frames import Connection, Operation, frame

WITHIN_S = 2.0  # for connecting, and for each message
NUMBERS_KEPT = 2  # members can be this far apart


class MeetingSignal:
    """A member's connection for signals. prefix: of the generation's keys; it begins with `<job's
    nonce>/<generation>/`. Used by one thread."""

    def __init__(self, host: str, port: int, prefix: str) -> None:
        """Connects to the store. Raises OSError if no store answers within WITHIN_S."""
        self._prefix = prefix
        self._sock = socket.create_connection((host, port), timeout=WITHIN_S)
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            self._sock.close()
            raise
        self._answers = Connection(self._sock)
        self._watched = -1
        self._given = -1  # the greatest number that was given, as far as is known here

    def is_given(self, number: int) -> bool:
        """Tells whether a member has given this number. Raises OSError, ValueError once the connection is of no use."""
        if number > self._watched:
            self._watched = number
            self._send(frame(Operation.GET, self._key(number)) + self._forgotten(number))
        self._read()
        return self._given >= number

    def give(self, number: int) -> None:
        """Gives this number to all members. Raises OSError if the store can't be reached."""
        self._given = max(self._given, number)
        self._send(frame(Operation.SET, self._key(number), b"1") + self._forgotten(number))

    def close(self) -> None:
        self._sock.close()

    def _key(self, number: int) -> bytes:
        return f"{self._prefix}/{number}".encode()

    def _forgotten(self, number: int) -> bytes:
        """Returns a message by which the store forgets what no member asks for once one of them is at `number`."""
        return frame(Operation.FORGET, self._key(number - NUMBERS_KEPT))

    def _send(self, data: bytes) -> None:
        self._sock.settimeout(WITHIN_S)
        self._sock.sendall(data)

    def _read(self) -> None:
        self._sock.setblocking(False)
        try:
            data = self._sock.recv(1 << 12)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("the store has closed the connection")
        self._answers.incoming += data
        for operation, key, _ in self._answers.frames():
            number = key.removeprefix(f"{self._prefix}/".encode())
            if operation == Operation.VALUE and number.isdigit():
                self._given = max(self._given, int(number))
