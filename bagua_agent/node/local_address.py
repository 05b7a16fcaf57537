"""Finds this node's address for the other nodes: the source address of its route to the store."""

from __future__ import annotations

import socket

from bagua_agent.base.errors import UserError
from bagua_contract.addresses import family_of, is_loopback, parted

LOOPBACK = "127.0.0.1"


class UnknownStoreName(UserError):
    """The host name of the store has no address, or none yet: a cluster's DNS may learn it later."""


_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # RFC 5737: nothing is ever sent there, it only asks for a route


def local_address(given: str | None, store_target: str | None, single_node: bool) -> str:
    """Returns the address at which other nodes reach this one.

    given: --local-addr. store_target: host:port of the store, None or a Unix socket if it is on this node. Raises
    UserError if `given` is not a name or address of anything, UnknownStoreName if the store's host is not.
    """
    if given:
        return _resolved(given, "--local-addr")
    if store_target is not None and not store_target.startswith("unix:"):
        host, port = parted(store_target)
        try:
            store_address = _resolved(host, "--rdzv-endpoint")
        except UserError as error:
            raise UnknownStoreName(str(error)) from error
        address = _source_towards((store_address, port))
        if address is not None and (single_node or not _means_this_host(host, address)):
            return address
    if single_node:
        return LOOPBACK
    return _source_towards(_DOCUMENTATION_ADDRESS) or LOOPBACK


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
    family = family_of(destination[0])
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(destination)  # a datagram socket's connect sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])
