"""Finds the network interface that has an address of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # a line each: address, index, prefix, scope, flags, name


def interface_of(host: str) -> str | None:
    """Returns the name of the interface with this address; None if there is none. A host name is resolved to its first
    IPv4 address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        try:
            address = ipaddress.ip_address(socket.gethostbyname(host))
        except OSError:
            return None
    return _with_ipv4(address.packed) if address.version == 4 else _with_ipv6(address.packed)


def _with_ipv4(wanted: bytes) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if found[20:24] == wanted:
                return name
    return None


def _with_ipv6(wanted: bytes) -> str | None:
    try:
        lines = _IPV6_ADDRESSES.read_text().splitlines()
    except OSError:
        return None  # a kernel without IPv6
    found = (line.split() for line in lines)
    return next((fields[5] for fields in found if len(fields) == 6 and fields[0] == wanted.hex()), None)
