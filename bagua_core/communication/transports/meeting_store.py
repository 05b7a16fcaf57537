"""The meeting store: a small key-value server in each worker, at which a generation's members exchange addresses.

torch's own TCPStore would do, but it looks up the name of every client by reverse DNS and stalls for seconds where
that does not answer, on the very path that must be quick. A get waits for its key. No value is changed; whole
generations are deleted, and signals (meeting_signal.py) once no member asks for them. Oversized frames
(meeting_frames.py) end the connection, and so does a client that asks on and on and does not read.
"""

from __future__ import annotations

import errno
import selectors
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_contract.addresses import family_of
from bagua_core.communication.transports.meeting_frames import Connection, Operation, frame
from bagua_core.errors import InfrastructureLost

GENERATIONS_KEPT = 16
MOST_UNREAD_BYTES = 16 << 20  # of answers that a client has asked for and does not take
# of one client that wait for a value; a MeetingStore has one at a time, a MeetingSignal three
MOST_QUESTIONS = 1024
ACCEPT_AGAIN_S = 0.1  # callers wait in the backlog meanwhile
_NOTHING_LEFT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class MeetingStoreError(InfrastructureLost, RuntimeError):
    """The server is gone, or did not have the key in time."""


class MeetingServer:
    """A server that runs in one thread until `close`. Keys begin with `<job's nonce>/<generation>/`, and the oldest
    generations are dropped with all that meets in them. What this worker publishes stays."""

    def __init__(self, bind_host: str) -> None:
        self._listener = socket.create_server((bind_host, 0), family=family_of(bind_host), backlog=512)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._groups: OrderedDict[bytes, dict[bytes, bytes]] = OrderedDict()
        self._published: dict[bytes, bytes] = {}  # replaced, never changed: another thread puts it
        self._waiting: dict[bytes, list[Connection]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._accepts = True
        self._thread = threading.Thread(target=self._run, name="bagua-meeting", daemon=True)
        self._thread.start()

    def publish(self, values: Mapping[bytes, bytes]) -> None:
        """Answers with these values from now on, also clients that wait for one, whatever a peer sets under their keys.
        An empty value withdraws its key. Any thread may call it."""
        self._published = {key: value for key, value in {**self._published, **values}.items() if value}
        self._wake_in.send(b"p")

    def close(self) -> None:
        self._wake_in.close()
        self._thread.join(2.0)

    def _run(self) -> None:
        with self._selector:
            while True:
                if not self._accepts:
                    ready = self._selector.select(ACCEPT_AGAIN_S)
                    self._selector.register(self._listener, selectors.EVENT_READ)
                    self._accepts = True
                else:
                    ready = self._selector.select()
                for key, events in ready:
                    if key.fileobj is self._wake_out:
                        if not self._wake_out.recv(1):
                            self._end()
                            return
                        for name, value in self._published.items():
                            self._answer_waiting(name, value)
                        continue
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._serve(key.data, events)

    def _end(self) -> None:
        self._listener.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            # The caller has hung up; or no descriptor is left: then the caller stays in the backlog, and the
            # listener would be reported ready again and again.
            if error.errno in _NOTHING_LEFT:
                self._selector.unregister(self._listener)
                self._accepts = False
            return
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            sock.close()
            return
        self._selector.register(sock, selectors.EVENT_READ, Connection(sock))

    def _serve(self, connection: Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                data = connection.sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError
                connection.incoming += data
                for operation, key, value in connection.frames():
                    self._do(connection, operation, key, value)
            self._flush(connection)
        except (OSError, ValueError):
            # A client that is gone or no client of ours: its own end notices.
            self._drop(connection)

    def _do(self, connection: Connection, operation: int, key: bytes, value: bytes) -> None:
        # the whole generation: its lanes and transports meet under many prefixes, none of which may push out another
        group = b"/".join(key.split(b"/", 2)[:2])
        if operation == Operation.SET:
            keys = self._groups.setdefault(group, {})
            if len(self._groups) > GENERATIONS_KEPT:
                self._groups.popitem(last=False)
            keys[key] = value
            self._answer_waiting(key, value, but=connection)
        elif operation == Operation.GET:
            if len(connection.outgoing) > MOST_UNREAD_BYTES or connection.questions >= MOST_QUESTIONS:
                raise ValueError("a client that asks and does not read")
            found = self._published.get(key) or self._groups.get(group, {}).get(key)
            if found is None:
                connection.questions += 1
                self._waiting.setdefault(key, []).append(connection)
            else:
                connection.outgoing += frame(Operation.VALUE, key, found)
        elif operation == Operation.FORGET:
            self._groups.get(group, {}).pop(key, None)
            for waiter in self._waiting.pop(key, []):
                waiter.questions -= 1
        else:
            raise ValueError(f"operation {operation}")

    def _answer_waiting(self, key: bytes, value: bytes, but: Connection | None = None) -> None:
        """Answers the clients that wait for the key. but: one that is being served, and flushed afterwards."""
        for waiter in self._waiting.pop(key, []):
            waiter.questions -= 1
            waiter.outgoing += frame(Operation.VALUE, key, value)
            if waiter is not but:
                self._serve(waiter, 0)

    def _flush(self, connection: Connection) -> None:
        if connection.outgoing:
            try:
                sent = connection.sock.send(connection.outgoing)
            except BlockingIOError:
                sent = 0
            del connection.outgoing[:sent]
            if len(connection.outgoing) > MOST_UNREAD_BYTES:
                raise ValueError("a client that does not read")
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.outgoing else 0)
        self._selector.modify(connection.sock, interest, connection)

    def _drop(self, connection: Connection) -> None:
        for key, waiters in list(self._waiting.items()):
            if connection in waiters:
                waiters.remove(connection)
                if not waiters:
                    del self._waiting[key]
        try:
            self._selector.unregister(connection.sock)
        except (KeyError, ValueError):
            return  # dropped already, while another connection was served
        connection.sock.close()


class MeetingStore(Store):
    """A client of a server, as a torch store: it has what Gloo needs to build a group (set, get, wait).

    One thread at a time asks. `interrupt` and `close` from any thread end a wait under way.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        """Connects to the server. Raises MeetingStoreError if no server answers within timeout_s."""
        super().__init__()
        self._timeout_s = timeout_s
        self._seen: dict[str, bytes] = {}
        self._asking = threading.Lock()
        try:
            self._sock = socket.create_connection((host, port), timeout=timeout_s)
        except OSError as error:
            raise MeetingStoreError(f"the store of rank 0 at {host}:{port}: {error}") from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        with self._asking:
            self._send(frame(Operation.SET, key.encode(), data), time.monotonic() + self._timeout_s)

    def get(self, key: str) -> bytes:
        return self._get(key, time.monotonic() + self._timeout_s)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # `timeout` is that of the group's operations, which may be much longer than meeting should take.
        deadline_s = time.monotonic() + self._timeout_s
        for key in keys:
            self._get(key, deadline_s)

    def has_extended_api(self) -> bool:
        return False

    def interrupt(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        self.interrupt()
        with self._asking:  # a thread in the system's call must not meet another socket of this number
            self._sock.close()

    def _get(self, key: str, deadline_s: float) -> bytes:
        with self._asking:
            if key not in self._seen:
                self._seen[key] = self._fetch(key, deadline_s)
            return self._seen[key]

    def _send(self, data: bytes, deadline_s: float) -> None:
        try:
            self._sock.settimeout(_left_s(deadline_s))
            self._sock.sendall(data)
        except OSError as error:
            raise MeetingStoreError(f"the store of rank 0: {error}") from error

    def _fetch(self, key: str, deadline_s: float) -> bytes:
        self._send(frame(Operation.GET, key.encode()), deadline_s)
        connection = Connection(self._sock)
        while True:
            try:
                # Of all answers together: who keeps talking of something else must not hold its client.
                self._sock.settimeout(_left_s(deadline_s))
                data = self._sock.recv(1 << 16)
            except OSError as error:
                raise MeetingStoreError(f"waiting for {key!r}: {error}") from error
            if not data:
                raise MeetingStoreError(f"waiting for {key!r}: the store of rank 0 has closed")
            connection.incoming += data
            try:
                frames = connection.frames()
            except ValueError as error:
                raise MeetingStoreError(f"waiting for {key!r}: what answers is no store: {error}") from error
            for operation, answered, value in frames:
                if operation == Operation.VALUE and answered == key.encode():
                    return value


def _left_s(deadline_s: float) -> float:
    """Returns the seconds until the deadline. Raises TimeoutError when nothing is left."""
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s
