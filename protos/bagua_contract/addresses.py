"""Formats a host and a port as one address, and parses it. Without look-ups."""

from __future__ import annotations

import ipaddress


def joined(host: str, port: int | str) -> str:
    """host:port, or [host]:port for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(address: str) -> tuple[str, int]:
    """Of what `joined` made. Raises ValueError if the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a name or an address without brackets is localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
