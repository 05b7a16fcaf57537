"""Reports the service's state to systemd: one datagram of lines; nothing without systemd."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

# A watchdog is fed so many times in its window: one late loop must not end the daemon.
FEEDS_IN_A_WINDOW = 4


class Notifier:
    """Sends the daemon's state to systemd. environ: with systemd's NOTIFY_SOCKET and WATCHDOG_USEC, or without."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        watchdog = environ.get("WATCHDOG_USEC", "")
        self.feed_every_s = int(watchdog) / 1e6 / FEEDS_IN_A_WINDOW if watchdog.isdecimal() else None
        """None: there is no watchdog."""
        self._status = ""
        self._fed_s = float("-inf")

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """Sends the line that `systemctl status` shows."""
        line = " ".join(text.split())
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def feed(self) -> None:
        """Feeds the watchdog: reports that this loop turns. Call it at least every feed_every_s."""
        if self.feed_every_s is None or time.monotonic() < self._fed_s + self.feed_every_s / 2:
            return
        self._fed_s = time.monotonic()
        self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(1.0)
                sender.sendto(text.encode(), address)
        except OSError as error:
            log.warning("systemd was not told %r: %s", text, error)
