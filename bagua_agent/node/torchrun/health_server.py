"""Answers health checks over HTTP at the port that TORCHELASTIC_HEALTH_CHECK_PORT names.

200 if the agent's loop takes a message within five seconds; 503 if not: the agent is stuck. Before the first message
the agent is joining the job, which may take as long as its peers need, so the answer is 200. Any path is accepted.
"""

from __future__ import annotations

import contextlib
import http.server
import logging
import socket
import threading
from collections.abc import Callable, Mapping

from bagua_agent.base.background import Failed, background_thread
from bagua_agent.base.errors import UserError
from bagua_agent.base.messages import HealthAsked

log = logging.getLogger(__name__)

VARIABLE = "TORCHELASTIC_HEALTH_CHECK_PORT"
ANSWER_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 2.0  # of a client that sends nothing; requests are answered one after the other
STOP_TIMEOUT_S = 10.0


def health_port(environ: Mapping[str, str]) -> int | None:
    """None: no server is asked for. Raises UserError."""
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text[:6]) < 65536:
        raise UserError(f"{VARIABLE}={text!r} is no port; give a number from 1 to 65535, or unset it")
    return int(text)


class _Server(http.server.HTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up or is too slow is none of the job's concern."""
        log.debug("a health check of %s was broken off", client_address, exc_info=True)


class HealthServer:
    """put: gives the agent's loop a message."""

    def __init__(self, port: int, put: Callable[[HealthAsked], None]) -> None:
        self._put = put
        self._loop_has_begun = False
        self._server: http.server.HTTPServer | None = None
        self._thread: threading.Thread | None = None
        try:
            self._server = _Server(("", port), self._handler())
        except OSError as problem:  # as torchrun: the job is worth more than its check
            log.warning("no health checks at port %d: %s; the job goes on without", port, problem.strerror)

    def start(self) -> None:
        if self._server is not None:
            self._thread = background_thread("health-checks", self._server.serve_forever, self._ended)
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
            log.warning("health checks are not answered any more: %s", end.reason)

    def _is_healthy(self) -> bool:
        asked = HealthAsked()
        self._put(asked)
        answered = asked.answered.wait(ANSWER_TIMEOUT_S if self._loop_has_begun else 0.1)
        self._loop_has_begun |= answered
        return answered or not self._loop_has_begun

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        is_healthy = self._is_healthy

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
                healthy = is_healthy()
                body = b"alive\n" if healthy else b"the agent's loop does not answer\n"
                self.send_response(200 if healthy else 503)
                self.send_header("Content-Type", "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                """Checks come every few seconds."""

        return Handler
