"""Lists where the jobs of a node serve their metrics, for Prometheus's HTTP service discovery. Pure.

The labels of a target begin with __meta_, so they serve relabelling alone: the series themselves have the job and the
node, and a second label of the same name would rename theirs to exported_node.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Mapping

from bagua_contract.addresses import joined, parted


def targets(addresses: Mapping[str, str], node_name: str, node_host: str) -> bytes:
    """Returns the JSON of http_sd_configs, a target for each job.

    addresses: by job, HOST:PORT at which its agent listens; one that is not `is_address` gives no target. node_host: by
    which others call this node.
    """
    groups = [
        {
            "targets": [_callable(address, node_host)],
            "labels": {"__meta_bagua_job": job_id, "__meta_bagua_node": node_name},
        }
        for job_id, address in sorted(addresses.items())
        if is_address(address)
    ]
    return json.dumps(groups).encode()


def is_address(text: str) -> bool:
    """Tells whether `text` is HOST:PORT. A damaged file of a job may hold anything."""
    try:
        parted(text)
    except ValueError:
        return False
    return True


def _callable(address: str, node_host: str) -> str:
    """Returns the address at which others call the agent: one that listens at every address is called at the node's."""
    host, port = parted(address)
    try:
        listens_at_all = not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        listens_at_all = False
    return joined(node_host, port) if listens_at_all else address
