"""Formats a host and a port as one address, and parses it. Without look-ups."""

from __future__ import annotations

import ipaddress
import socket


def joined(host: str, port: int | str) -> str:
    """Returns host:port, or [host]:port for an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parted(address: str) -> tuple[str, int]:
    """Returns the host and port of what `joined` returned. Raises ValueError if the port is no number."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def family_of(host: str) -> socket.AddressFamily:
    """Returns the family of a socket for this address, or for a name, which is taken for one of IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_loopback(host: str) -> bool:
    """Tells whether a name or an address without brackets is localhost or a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
