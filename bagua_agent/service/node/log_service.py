"""Serves a node's logs once its port is free. The daemon follows its orders meanwhile.

A job may have taken the port while the daemon was restarted. Only `bagua-launch logs` fails on this node then, so the
node's record holds it as a note. A note does not keep jobs away: otherwise one job could keep others from its node.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from bagua_agent.base.background import Failed, OperationEnd, background_thread, describe, is_bug
from bagua_agent.service.node.node_server import NodeServer

log = logging.getLogger(__name__)

TRY_AGAIN_S = 5.0
STOP_TIMEOUT_S = 10.0


class LogService:
    """Serves the logs in a thread of its own as soon as the server can be made. make: raises while the port can't be
    had, and is called again whatever it raises. note(text): called from another thread with what does not work now,
    empty for nothing. say: a line for the log."""

    def __init__(
        self,
        make: Callable[[], NodeServer],
        note: Callable[[str], object],
        say: Callable[[str], object],
        try_again_s: float = TRY_AGAIN_S,
    ) -> None:
        self._make = make
        self._note = note
        self._say = say
        self._try_again_s = try_again_s
        self._stopping = threading.Event()
        self._thread = background_thread("bagua-logs", self._serve, self._ended)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_TIMEOUT_S)

    def _serve(self) -> None:
        server = self._make_server()
        if server is not None:
            try:
                self._stopping.wait()
            finally:
                server.stop()

    def _make_server(self) -> NodeServer | None:
        """Makes the server, and tries again until it can be made. Returns None if it was asked to stop before the port
        could be had."""
        told = ""
        while not self._stopping.is_set():
            try:
                server = self._make()
            except Exception as error:  # a port, a file or a thread that can be had later, or a bug of ours
                if describe(error) != told:
                    told = describe(error)
                    if is_bug(error):
                        log.error("bug: serving logs raised %s", told, exc_info=error)
                    self._say(
                        f"no logs are served, and it is tried again every {self._try_again_s:g} s: {told}"
                    )
                    self._note(f"its logs can't be read: {told}")
                self._stopping.wait(self._try_again_s)
            else:
                if told:
                    self._say("logs are served: the port could be had")
                    self._note("")
                return server
        return None

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            self._say(f"no logs are served any more: {end.reason}; restart the daemon")
            self._note(f"its logs can't be read: {end.reason}; restart the daemon")
