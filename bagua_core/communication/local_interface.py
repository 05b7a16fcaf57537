"""Finds the network interface that has an address of this host."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from bagua_contract.ipv6_addresses import ipv6_addresses

_SIOCGIFADDR = 0x8915


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
    if address.version == 4:
        return _with_ipv4(address.packed)
    try:
        return next((one.interface for one in ipv6_addresses() if one.address.packed == address.packed), None)
    except OSError:
        return None


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
