"""Lists the addresses of this host's network interfaces that other hosts may reach. Linux."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua_contract.ipv6_addresses import ipv6_addresses

_INTERFACES = Path("/sys/class/net")
_GET_FLAGS, _GET_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_LOOPBACK, _RUNNING = 0x8, 0x40  # IFF_LOOPBACK, IFF_RUNNING: has a carrier, as an unused bridge has not
_GLOBAL_SCOPE = 0
_TENTATIVE, _REFUSED = 0x40, 0x08  # IFA_F_TENTATIVE, IFA_F_DADFAILED


def interface_addresses() -> dict[str, list[str]]:
    """Returns the addresses by interface, IPv4 first. Leaves out interfaces without a carrier or an address,
    bridges between containers of this host, and loopback and link-local addresses."""
    found: dict[str, list[str]] = {}
    of_ipv6 = _ipv6_addresses()
    with _socket_to_ask() as kernel:
        for _, name in socket.if_nameindex():
            flags = _asked(kernel, _GET_FLAGS, name)
            if flags is None or struct.unpack_from("=H", flags)[0] & (_LOOPBACK | _RUNNING) != _RUNNING:
                continue
            if _is_within_host(name):
                continue
            address = _asked(kernel, _GET_ADDRESS, name)
            of_ipv4 = [] if address is None else [socket.inet_ntoa(address[4:8])]
            addresses = [a for a in (*of_ipv4, *of_ipv6.get(name, ())) if _leaves_the_host(a)]
            if addresses:
                found[name] = addresses
    return found


def has_ipv6_alone(addresses: Mapping[str, Sequence[str]]) -> bool:
    """Tells whether all of a host's addresses are of IPv6. addresses: by interface; False if there is none."""
    every = [address for some in addresses.values() for address in some]
    return bool(every) and all(":" in address for address in every)


def _socket_to_ask() -> socket.socket:
    """Returns a socket whose requests concern interfaces. Only one of IPv4 has answers about addresses of IPv4."""
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    except OSError:  # no IPv4 here
        return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)


def _is_within_host(interface: str) -> bool:
    """Tells whether the interface is a bridge none of whose ports leads to a network card. Every host may have one with
    the same address, as docker0."""
    if not (_INTERFACES / interface / "bridge").exists():
        return False
    ports = [_INTERFACES / port.name for port in (_INTERFACES / interface / "brif").glob("*")]
    # a bond or a VLAN has no device, but names the interface below it
    return not any((port / "device").exists() or any(port.glob("lower_*")) for port in ports)


def _asked(kernel: socket.socket, request: int, interface: str) -> bytes | None:
    """Returns the answer's part behind the name of the interface; None if it has no such property, or is gone."""
    try:
        return fcntl.ioctl(kernel, request, struct.pack("40s", interface.encode()))[16:]
    except OSError:
        return None


def _ipv6_addresses() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in ipv6_addresses():
        if one.scope == _GLOBAL_SCOPE and not one.flags & (_TENTATIVE | _REFUSED):
            found.setdefault(one.interface, []).append(str(one.address))
    return found


def _leaves_the_host(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local)
