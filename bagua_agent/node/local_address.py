"""Finds this node's address for the other nodes: the source address of its route to the store, or where there is none
another address by which packets leave the host. A loopback address that others are given is their own host's."""

from __future__ import annotations

import socket

from bagua_agent.base.errors import UserError
from bagua_agent.base.plain_text import some
from bagua_agent.node.interface_addresses import interface_addresses
from bagua_contract.addresses import family_of, is_loopback, parted

LOOPBACK = "127.0.0.1"


class UnknownStoreName(UserError):
    """The host name of the store has no address, or none yet: a cluster's DNS may learn it later."""


# RFC 5737, RFC 3849: nothing is ever sent there, they only ask for a route
_DOCUMENTATION_V4, _DOCUMENTATION_V6 = ("192.0.2.1", 9), ("2001:db8::1", 9)


def local_address(given: str | None, store_target: str | None, single_node: bool) -> str:
    """Returns the address at which other nodes reach this one, if `store_target` is all that is known of the store.

    given: --local-addr. store_target: host:port of the store, None or a Unix socket if it is on this node. Raises
    UserError if `given` is not a name or address of anything, or is needed; UnknownStoreName if the store's host name
    has no address.
    """
    if given:
        return _resolved(given, "--local-addr")
    address = address_on_route(store_target, single_node)
    return _address_without_route() if address is None else address


def address_on_route(store_target: str | None, single_node: bool) -> str | None:
    """Returns the source address of this host's route to the store, or of its default route of IPv4 where the store is
    on this host or no route leads to it; None without such a route. Raises UnknownStoreName."""
    if store_target is not None and not store_target.startswith("unix:"):
        host, port = parted(store_target)
        try:
            store_address = _resolved(host, "--rdzv-endpoint")
        except UserError as error:
            raise UnknownStoreName(str(error)) from error
        address = _source_towards((store_address, port))
        if address is not None and (single_node or not _means_this_host(host, address)):
            return address
    return LOOPBACK if single_node else _source_towards(_DOCUMENTATION_V4)


def _address_without_route() -> str:
    """Returns the address of a host without a default route of IPv4. Raises UserError if only a person knows which of
    several it is: others that probe a wrong one may find an address of their own host, where no agent listens, and
    take that for a proof that this one is gone."""
    found = interface_addresses()
    if not found:
        return LOOPBACK  # the host has no other: nothing reaches it from outside
    if len(found) == 1:
        return next(iter(found.values()))[0]
    if (address := _source_towards(_DOCUMENTATION_V6)) is not None:
        return address
    each = some((f"{addresses[0]} at {name}" for name, addresses in found.items()), 4)
    raise UserError(
        f"this host has no default route, and several addresses ({each}); give the one at which other nodes reach it: "
        "--local-addr ADDRESS, for a daemon listen.address"
    )


def _means_this_host(host: str, address: str) -> bool:
    """Tells whether `host` is a name that leads to a loopback address on this host alone, as /etc/hosts often has it
    for a host's own name. The other nodes know it by another address."""
    return host != address and not is_loopback(host) and is_loopback(address)


def _resolved(host: str, flag: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except socket.gaierror as error:
        raise UserError(f"{flag} {host!r} can't be resolved ({error.strerror}); give an address") from error
    except UnicodeError as error:
        # an empty label, as of a variable that was not set, or one of over 63 characters
        raise UserError(
            f"{flag} {host!r} is no host name ({error.__cause__ or error}); give an address"
        ) from error


def _source_towards(destination: tuple[str, int]) -> str | None:
    try:
        with socket.socket(family_of(destination[0]), socket.SOCK_DGRAM) as probe:
            probe.connect(destination)  # a datagram socket's connect sends nothing
            return str(probe.getsockname()[0])
    except OSError:  # no route, or a host without the family
        return None
