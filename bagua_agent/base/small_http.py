"""An HTTP server for short answers, such as health checks: one request after the other, each within a bound."""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from bagua_agent.base.background import Failed, background_thread

log = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 2.0  # of a client that sends nothing; requests are answered one after the other
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class _Server(http.server.HTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up or is too slow is none of the job's concern."""
        log.debug("a request of %s was broken off", client_address, exc_info=True)


class SmallHttpServer:
    """Answers GET and HEAD at a port of all addresses, from its own thread, between `start` and `stop`.

    what: it answers, for its warnings. answer(path): called in that thread. A port that can't be opened is a warning:
    the job is worth more than what watches it. port: 0 takes a free one.
    """

    def __init__(self, port: int, what: str, answer: Callable[[str], Answer]) -> None:
        self._what = what
        self._server: http.server.HTTPServer | None = None
        self._thread: threading.Thread | None = None
        try:
            self._server = _Server(("", port), _handler(answer))
        except OSError as problem:
            log.warning("no %s at port %d: %s; the job goes on without", what, port, problem.strerror)

    @property
    def port(self) -> int | None:
        """None if it could not be opened."""
        return None if self._server is None else self._server.server_port

    def start(self) -> None:
        if self._server is not None:
            self._thread = background_thread("small-http", self._server.serve_forever, self._ended)
            self._thread.start()

    def stop(self) -> None:
        if self._server is None:
            return
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(STOP_TIMEOUT_S)
        self._server.server_close()

    def _ended(self, end: object) -> None:
        if isinstance(end, Failed):
            log.warning("%s are not answered any more: %s", self._what, end.reason)


def _handler(answer: Callable[[str], Answer]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def setup(self) -> None:
            super().setup()
            # `timeout` bounds each read; a client that sends a byte a second would hold all others.
            self._limit = threading.Timer(REQUEST_TIMEOUT_S, self._hang_up)
            self._limit.daemon = True
            self._limit.start()

        def finish(self) -> None:
            self._limit.cancel()
            super().finish()

        def _hang_up(self) -> None:
            with contextlib.suppress(OSError):  # the client was first
                self.connection.shutdown(socket.SHUT_RDWR)

        def do_GET(self) -> None:
            self._limit.cancel()
            said = answer(self.path.split("?")[0])
            self.send_response(said.status)
            self.send_header("Content-Type", said.content_type)
            self.send_header("Content-Length", str(len(said.body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(said.body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Requests come every few seconds."""

    return Handler
