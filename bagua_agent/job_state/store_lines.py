"""Formats what the terminal shows of the job's etcd when a node has opened it: where it is, and how other nodes join.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from bagua_agent.base.plain_text import counted
from bagua_agent.config.job_config import JobConfig
from bagua_agent.job_state.console import node_range
from bagua_contract.addresses import is_loopback, parted
from bagua_contract.distribution import original_beside


def joining(config: JobConfig, endpoint: str) -> str:
    least, most = config.min_nodes, config.max_nodes
    nodes = node_range(least, most)
    store = endpoint if most > 1 or config.endpoints else "private"
    return f"job {config.job_id}: {counted(config.slots, 'worker')} here, {nodes}, store {store}"


def joining_command(endpoint: str, job_id: str, nodes: str, slots: int, command: str) -> str:
    workers = "" if slots == 1 else f" --nproc-per-node {slots}"
    who = (
        "other agents on this host join with" if is_loopback(parted(endpoint)[0]) else "other nodes join with"
    )
    return (
        f"{who}:\n"
        f"    bagua-launch --nnodes {nodes}{workers} --rdzv-endpoint {endpoint} --rdzv-id {job_id} {command}"
    )


def store_opened(config: JobConfig, endpoint: str, hosts_for_others: bool, exposed: bool) -> Iterator[str]:
    """exposed: etcd is reached beyond this machine without TLS."""
    yield joining(config, endpoint)
    if beside := original_beside():
        yield f"WARNING: {beside}"
    if hosts_for_others:
        yield joining_command(
            endpoint,
            config.job_id,
            f"{config.min_nodes}:{config.max_nodes}",
            config.slots,
            str(config.command),
        )
        if is_loopback(parted(endpoint)[0]):
            yield (
                f"WARNING: other hosts can't reach {endpoint}: for nodes there, start all nodes with a name or address "
                "of this host, as --rdzv-endpoint HOST:PORT"
            )
            return
    if exposed or hosts_for_others:
        yield (
            "note: etcd is reached without TLS; any client that reaches it can run code in this job, "
            "so keep it on a private network"
        )
