"""Decides where a dashboard listens: --dashboard, =PORT or =HOST:PORT. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_contract.addresses import parted

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 7465


@dataclass(frozen=True, slots=True)
class Listening:
    """The address at which a dashboard listens. or_any_port: take a free one where `port` is taken, as two agents of
    one host do."""

    host: str = LOOPBACK
    port: int = DEFAULT_PORT
    or_any_port: bool = True

    @staticmethod
    def parse(text: str) -> Listening:
        """Reads the address at which a dashboard listens. text: empty for the default, a port, or an address with a
        port; port 0 is a free one. Raises ValueError."""
        if not text:
            return Listening()
        try:
            host, port = parted(text if ":" in text else f"{LOOPBACK}:{text}")
        except ValueError:
            host, port = "", -1
        if not host or not 0 <= port < 1 << 16:
            raise ValueError(f"{text!r} is neither a port nor HOST:PORT")
        return Listening(host, port, or_any_port=False)
