"""Formats what the terminal shows of the job's etcd when a node has opened it: where it is, and how other nodes join.
Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from bagua_agent.base.plain_text import counted
from bagua_agent.config.job_config import DIGEST_EVERY_STEPS, JobConfig
from bagua_agent.job_state.console import node_range
from bagua_contract.addresses import is_loopback, parted
from bagua_contract.distribution import original_beside


def joining(config: JobConfig, endpoint: str) -> str:
    least, most = config.min_nodes, config.max_nodes
    nodes = node_range(least, most)
    store = endpoint if most > 1 or config.endpoints else "private"
    return f"job {config.job_id}: {counted(config.slots, 'worker')} here, {nodes}, store {store}"


def joining_command(config: JobConfig, endpoint: str) -> str:
    """Returns the command that a node like this one joins with: it has the options that the nodes of a job need
    alike."""
    words = ["bagua-launch", "--nnodes", f"{config.min_nodes}:{config.max_nodes}"]
    if config.slots != 1:
        words += ["--nproc-per-node", str(config.slots)]
    words += ["--rdzv-endpoint", endpoint, "--rdzv-id", config.job_id, *common_options(config)]
    who = (
        "other agents on this host join with" if is_loopback(parted(endpoint)[0]) else "other nodes join with"
    )
    return f"{who}:\n    {shlex.join(words)} {config.command}"


def common_options(config: JobConfig) -> list[str]:
    """Returns the options that each node gives to its workers. The job's record in etcd has the others of the first
    node."""
    words = []
    if config.replica_size != 1:
        words += ["--replica-size", str(config.replica_size or "node")]
    if config.virtual_shards:
        words += ["--deterministic", "--virtual-shards", str(config.virtual_shards)]
    if config.ledger_dir:
        words += ["--ledger", config.ledger_dir]
    if config.digest_every_steps != DIGEST_EVERY_STEPS:
        words += ["--digest-every", str(config.digest_every_steps)]
    if config.checkpoint_dir:
        words += ["--checkpoint-dir", config.checkpoint_dir, "--checkpoint-every", config.checkpoint_every]
    return words


def store_opened(
    config: JobConfig, endpoint: str, hosts_for_others: bool, exposed: bool, defect: str = ""
) -> Iterator[str]:
    """Yields the lines to print. exposed: etcd is reached beyond this machine without TLS. defect: of its release;
    empty: none is known."""
    yield joining(config, endpoint)
    if defect:
        yield f"WARNING: {defect}"
    if beside := original_beside():
        yield f"WARNING: {beside}"
    if hosts_for_others:
        yield joining_command(config, endpoint)
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
