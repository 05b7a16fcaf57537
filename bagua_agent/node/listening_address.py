"""Chooses the address at which an etcd listens that other nodes reach by this node's name.

Other nodes connect to an endpoint. A name in it may resolve differently here: many systems give a host's own name a
loopback address, and a service's name or an address may be translated on the way.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

from bagua_agent.node.interface_addresses import has_ipv6_alone, interface_addresses
from bagua_contract.addresses import is_loopback, joined, parted

EVERYWHERE = "0.0.0.0"
EVERYWHERE_V6 = "::"
_LOCAL_NAME = "localhost"


def listening_host(host: str, own: Sequence[str], *, ipv6_alone: bool = False) -> str:
    """Returns the address to bind. host: a name or an address, without brackets. own: addresses of this host that the
    name resolves to here. ipv6_alone: others reach this host by IPv6 alone. Pure."""
    if host == _LOCAL_NAME or (_is_address(host) and own):
        return host
    if _is_address(host):  # translated on the way, too: as that of the machine around a container
        return EVERYWHERE_V6 if ":" in host else EVERYWHERE
    reached = [a for a in own if not is_loopback(a.partition("%")[0])]
    return reached[0] if reached else EVERYWHERE_V6 if ipv6_alone else EVERYWHERE


def listening_target(target: str) -> str:
    """Returns the host:port to bind, for nodes that connect to `target`."""
    host, port = parted(target)
    ipv6_alone = has_ipv6_alone(interface_addresses())
    return joined(listening_host(host, own_addresses(host), ipv6_alone=ipv6_alone), port)


def own_addresses(host: str) -> list[str]:
    """Returns the addresses of this host that `host` resolves to; none if it can't be resolved."""
    return [str(address[0]) for family, _, _, _, address in _resolved(host) if _can_bind(family, address)]


def is_this_host(host: str, own_name: str) -> bool:
    """Tells whether `host` names this host, whose name is own_name. The DNS of a cluster may learn the fully qualified
    name of a host only after its start, so an unknown name counts if it is own_name with a domain, or without one."""
    if host.lower() == own_name.lower():
        return True
    if found := _resolved(host):
        return any(_can_bind(family, address) for family, _, _, _, address in found)
    labels = {name.lower().partition(".")[0] for name in (host, own_name)}
    return len(labels) == 1 and ("." in host) != ("." in own_name)


def _resolved(host: str) -> list[tuple[socket.AddressFamily, object, int, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # the second of a name with an empty or an overlong label
        return []


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
