"""Parses --replica-size, and checks that the numbers of nodes hold whole replicas. Pure."""

from __future__ import annotations

import re

from bagua_agent.base.plain_text import counted
from bagua_agent.base.sizes import nodes_with_a_part, whole_replicas
from bagua_agent.config.job_config import JobConfig
from bagua_launch.errors import refuse
from bagua_launch.written_values import Values, WrittenValue


def parse_replica_size(written: WrittenValue) -> int:
    """Returns the workers of a replica; 0: the workers of a node. Raises RequestError."""
    if written.text == "node":
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,4}", written.text):
        raise refuse(written, "not a number of workers", "a number from 1 on, or node")
    return int(written.text)


def check_replicas(values: Values, config: JobConfig, slots: int) -> None:
    """Checks that every node has a part of a replica. slots: workers of each node.

    Raises RequestError for a number of nodes that may be set for the job, and that leaves a node without such a part:
    the job would never have so many.
    """
    size = config.replica_size or slots
    if size == 1:
        return
    written = values["replica_size"]
    for nodes, what in (
        (config.min_nodes, "the least of --nnodes"),
        *((s, "one of --sizes") for s in config.size_policy.sizes),
        *(((config.size_policy.start_size, "--start-size"),) if config.size_policy.start_size else ()),
    ):
        used, enough = whole_replicas(nodes, slots, size)
        if used == nodes:
            continue
        workers = f"{counted(nodes, 'node')} with {counted(slots, 'worker')} each ({what})"
        holds = "hold no replica" if not used else f"hold replicas on {counted(used, 'node')} only"
        raise refuse(
            written, f"{workers} {holds}", f"at least {counted(enough, 'node')}, or another --replica-size"
        )


def group_size(values: Values, config: JobConfig, slots: int) -> int:
    """Returns the workers of a replica of several nodes, of which a scheduler gives and takes whole groups; 0: there is
    none, or the job's sizes are listed. slots: of each node; 0: as many as it has. Raises RequestError."""
    size = config.replica_size
    if size == 1 or not (size or slots):
        return 0  # a worker or a node is a replica
    written = values["replica_size"]
    if not slots:
        raise refuse(
            written, "how many workers a node has is not known", "--nproc-per-node N with it, or node"
        )
    check_replicas(values, config, slots)
    if size <= slots or config.size_policy.sizes:
        return 0
    least, most = config.min_nodes, config.max_nodes
    used = nodes_with_a_part(most, slots, size)
    if used != most:
        workers = f"{counted(most, 'node')} with {counted(slots, 'worker')} each"
        raise refuse(
            written,
            f"{workers} hold replicas on {counted(used, 'node')} only",
            f"--nnodes {least}:{used} with it",
        )
    return size
