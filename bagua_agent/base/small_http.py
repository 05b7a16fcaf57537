"""An HTTP server for short answers: health checks, metrics, the dashboard. Each request is answered within a bound.

Answers one request after the other, or several side by side where it is given threads: a browser keeps connections open
that it may never use.
"""

from __future__ import annotations

import contextlib
import errno
import http.server
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from bagua_agent.base import backoff
from bagua_agent.base.background import Failed, background_thread
from bagua_contract.addresses import family_of

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0  # of a client that sends nothing; requests are answered one after the other
STOP_TIMEOUT_S = 10.0
FIRST_RETRY_S = 0.5  # of a port that can't be opened
LONGEST_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


Guard = Callable[[str, Mapping[str, str]], Answer | None]


class ServerTls(Protocol):
    """The server's side of TLS."""

    def wrap(self, connection: socket.socket) -> ssl.SSLSocket:
        """Wraps a connection, without the handshake. `connection` is of no use afterwards."""

    def refusal(self, connection: ssl.SSLSocket) -> Answer | None:
        """Returns what is answered instead, if the caller is not to be served; else None."""


class _Server(http.server.HTTPServer):
    def __init__(self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = family_of(address[0])
        super().__init__(address, handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs a request that failed: a client that hangs up or is too slow is none of the job's concern."""
        log.debug("a request of %s was broken off", client_address, exc_info=True)


class _ThreadedServer(socketserver.ThreadingMixIn, _Server):
    """Serves at most `most` requests at once; a connection beyond them is closed."""

    def __init__(
        self, address: tuple[str, int], handler: type[http.server.BaseHTTPRequestHandler], most: int
    ) -> None:
        self.daemon_threads = False  # server_close joins them; each ends within REQUEST_TIMEOUT_S
        self._free = threading.BoundedSemaphore(most)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()  # no thread was started
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


class SmallHttpServer:
    """Answers GET and HEAD between `start` and `stop`.

    what: it answers, for its warnings. answer(path): called in a thread of the server. A port that can't be opened is a
    warning, for the job is worth more than what watches it; from `start` on it is tried again, ever more rarely.

    port: 0 takes a free one; or_any_port: also if it is taken. host: an address; empty for all. threads: requests that
    are answered side by side; 0: one after the other. headers: of every answer. guard(path, headers): what is answered
    instead of a request that is refused, or None; names of headers are in lower case. tls: None serves plain HTTP.
    """

    def __init__(
        self,
        port: int,
        what: str,
        answer: Callable[[str], Answer],
        *,
        host: str = "",
        threads: int = 0,
        headers: Mapping[str, str] | None = None,
        guard: Guard = lambda path, headers: None,
        or_any_port: bool = False,
        tls: ServerTls | None = None,
    ) -> None:
        self._what = what
        self._port = port
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._server: http.server.HTTPServer | None = None
        self._thread: threading.Thread | None = None
        handler = _handler(answer, headers or {}, guard, tls)
        self._open: Callable[[], http.server.HTTPServer] = lambda: _open(
            host, port, handler, threads, or_any_port=or_any_port
        )
        try:
            self._server = self._open()
        except OSError as problem:
            log.warning("no %s at port %d: %s; everything else goes on without", what, port, problem.strerror)

    @property
    def port(self) -> int | None:
        """The port; None if it could not be opened."""
        return None if self._server is None else self._server.server_port

    def start(self) -> None:
        self._thread = background_thread("small-http", self._serve, self._ended)
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            server = self._server
        if self._thread is not None:
            if server is not None:
                server.shutdown()  # the thread serves, or is about to
            self._thread.join(STOP_TIMEOUT_S)
        if server is not None:
            server.server_close()

    def _serve(self) -> None:
        server = self._server or self._open_later()
        if server is not None:
            server.serve_forever()

    def _open_later(self) -> http.server.HTTPServer | None:
        """Tries again until the port is open. None: stopped before."""
        failed = 1
        while not self._stopping.wait(backoff.delay_s(failed, FIRST_RETRY_S, LONGEST_RETRY_S)):
            try:
                opened = self._open()
            except OSError:  # it was said when the first attempt failed
                failed += 1
                continue
            with self._lock:
                if self._stopping.is_set():
                    opened.server_close()
                    return None
                self._server = opened
            log.warning("%s is answered at port %d now", self._what, self._port)
            return opened
        return None

    def _ended(self, end: object) -> None:
        if isinstance(end, Failed):
            log.warning("%s are not answered any more: %s", self._what, end.reason)


def _open(
    host: str,
    port: int,
    handler: type[http.server.BaseHTTPRequestHandler],
    threads: int,
    *,
    or_any_port: bool,
) -> http.server.HTTPServer:
    """Opens the port and returns the server. Raises OSError."""
    try:
        return _ThreadedServer((host, port), handler, threads) if threads else _Server((host, port), handler)
    except OSError as problem:
        if not or_any_port or problem.errno != errno.EADDRINUSE:
            raise
    return _open(host, 0, handler, threads, or_any_port=False)


def _handler(
    answer: Callable[[str], Answer], headers: Mapping[str, str], guard: Guard, tls: ServerTls | None
) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def setup(self) -> None:
            self._secured = None if tls is None else tls.wrap(self.request)
            if self._secured is not None:
                self.request = self._secured
            # `timeout` bounds each read; a client that sends a byte a second would hold all others.
            self._limit = threading.Timer(REQUEST_TIMEOUT_S, self._hang_up)
            self._limit.daemon = True
            self._limit.start()
            if self._secured is not None:
                self._shake_hands(self._secured)
            super().setup()

        def _shake_hands(self, connection: ssl.SSLSocket) -> None:
            connection.settimeout(self.timeout)
            try:
                connection.do_handshake()
            except BaseException:  # no request, so `finish` is not called
                self._limit.cancel()
                connection.close()
                raise

        def finish(self) -> None:
            self._limit.cancel()
            try:
                super().finish()
            finally:
                if self._secured is not None:
                    self._hang_up()
                    self._secured.close()  # the server knows the plain socket alone, which was detached

        def _hang_up(self) -> None:
            with contextlib.suppress(OSError):  # the client was first
                socket.socket.shutdown(self.request, socket.SHUT_RDWR)  # TLS's own is not for two threads

        def do_GET(self) -> None:
            self._limit.cancel()
            path = self.path.split("?")[0]
            refused = tls.refusal(self._secured) if tls is not None and self._secured is not None else None
            asked = {name.lower(): value for name, value in self.headers.items()}
            said = refused or guard(path, asked) or answer(path)
            self.send_response(said.status)
            self.send_header("Content-Type", said.content_type)
            self.send_header("Content-Length", str(len(said.body)))
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Requests come every few seconds."""

    return Handler
