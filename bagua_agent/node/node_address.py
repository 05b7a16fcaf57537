"""The address at which other nodes reach this one, from the endpoints of the store that a configuration lists."""

from __future__ import annotations

from collections.abc import Sequence

from bagua_agent.config.job_config import JobConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.node.local_address import UnknownStoreName, address_on_route, local_address
from bagua_contract.addresses import is_loopback


def node_address(config: JobConfig, *, hosts_store: bool = False) -> str:
    """Returns the address at which other nodes reach this one. hosts_store: the store is on this node, so its name need
    not be known here.

    Raises UnknownStoreName if no endpoint's host name has an address; UserError, see local_address.
    """
    # one whose etcd others share may be scaled later
    single_node = config.max_nodes == 1 and (config.endpoints is None or hosts_store)
    try:
        targets = [parse_endpoint(endpoint).target for endpoint in config.endpoints or ()]
        return address_towards(config.local_addr, targets, single_node=single_node)
    except UnknownStoreName:
        if not hosts_store:
            raise
        return local_address(config.local_addr, None, single_node)


def address_towards(given: str | None, targets: Sequence[str], *, single_node: bool) -> str:
    """Returns this host's address on the route to the first target whose name is known and whose route leaves this
    host; without such a target, local_address. Returns a loopback address of a target only if no target leaves this
    host's address open.

    given: --local-addr. targets: host:port, or a Unix socket. Raises UnknownStoreName if no target has a known name;
    UserError, see local_address.
    """
    if given:
        return local_address(given, None, single_node)
    loopback: str | None = None
    unknown: UnknownStoreName | None = None
    without_route = not targets
    for target in targets:
        try:
            address = address_on_route(target, single_node)
        except UnknownStoreName as error:
            unknown = unknown or error
            continue
        if address is None:
            without_route = True  # as this host's own name: another target's route may tell the address
        elif single_node or not is_loopback(address):
            return address
        else:
            loopback = loopback or address
    if without_route:
        return local_address(None, None, single_node)
    if loopback is not None:
        return loopback
    assert unknown is not None
    raise unknown
