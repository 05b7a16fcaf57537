"""Reads the IPv6 addresses of this host's network interfaces from /proc. Linux."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

_ADDRESSES = Path("/proc/net/if_inet6")  # a line each: address, index, prefix, scope, flags, name


@dataclass(frozen=True, slots=True)
class InterfaceAddress:
    """An address of an interface."""

    address: ipaddress.IPv6Address
    scope: int  # 0: global
    flags: int  # IFA_F_...
    interface: str


def ipv6_addresses() -> list[InterfaceAddress]:
    """Returns all addresses, loopback and link-local ones among them; none on a kernel without IPv6. Raises OSError if
    they can't be read."""
    try:
        lines = _ADDRESSES.read_text().splitlines()
    except FileNotFoundError:
        return []
    fields = [line.split() for line in lines]
    return [
        InterfaceAddress(ipaddress.IPv6Address(int(digits, 16)), int(scope, 16), int(flags, 16), name)
        for digits, _, _, scope, flags, name in fields
    ]
