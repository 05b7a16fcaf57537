"""A port on this machine's loopback that leads to one on a lab host: for clients that run in the test's own process.

gRPC makes its connections in threads of its own, which are in the machine's network and not in the host's.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.lab.network import Host

_CONNECT_TIMEOUT_S = 5.0
_BYTES = 65536


class Forward:
    """From construction to `close`. endpoint: host:port to connect to."""

    def __init__(self, host: Host, target: tuple[str, int]) -> None:
        self._host = host
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="lab-forward", daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = list(self._open)
        for one in (self._listener, *left):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            try:
                far = self._host.connect(self._target, _CONNECT_TIMEOUT_S)
            except OSError:
                near.close()  # as a port without a listener
                continue
            far.settimeout(None)
            with self._lock:
                if self._closed:
                    near.close()
                    far.close()
                    return
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pump, args=(source, sink), name="lab-forward", daemon=True
                ).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end is gone, or we are closed
            while data := source.recv(_BYTES):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        with self._lock:
            self._open.discard(source)
