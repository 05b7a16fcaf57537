"""The address at which the other nodes of a job reach this one, from what the job's configuration says."""

from __future__ import annotations

from bagua_agent.config.job_config import JobConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.node.local_address import UnknownStoreName, local_address


def node_address(config: JobConfig, *, hosts_store: bool = False) -> str:
    """hosts_store: the store is on this node, so its name need not be known here.

    Raises UnknownStoreName if no endpoint's host name has an address; UserError, see local_address.
    """
    single_node = config.max_nodes == 1
    unknown: UnknownStoreName | None = None
    for endpoint in config.endpoints or ():
        try:
            return local_address(config.local_addr, parse_endpoint(endpoint).target, single_node)
        except UnknownStoreName as error:
            unknown = unknown or error
    if unknown is not None and not hosts_store:
        raise unknown
    return local_address(config.local_addr, None, single_node)
