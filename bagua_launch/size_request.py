"""Parses the sizes that a job may have: --sizes, --start-size and --cooldown. Pure."""

from __future__ import annotations

import re

from bagua_agent.base.plain_text import counted
from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_launch import scalar_values
from bagua_launch.errors import refuse
from bagua_launch.written_values import Values, WrittenValue

_SIZES = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9})*")


def parse_size_policy(values: Values, min_nodes: int, max_nodes: int) -> SizePolicy:
    """Returns the job's policy of sizes. min_nodes, max_nodes: of --nnodes. Raises RequestError."""
    sizes = _sizes(values, min_nodes, max_nodes)
    start_size = (
        _start_size(values["start_size"], sizes, min_nodes, max_nodes) if "start_size" in values else 0
    )
    cooldown_s = scalar_values.seconds(values["cooldown"]) if "cooldown" in values else ANY_SIZE.cooldown_s
    return SizePolicy(sizes, start_size, cooldown_s)


def _sizes(values: Values, min_nodes: int, max_nodes: int) -> tuple[int, ...]:
    written = values.get("sizes")
    if written is None:
        return ()
    if not _SIZES.fullmatch(written.text):
        raise refuse(written, "no list of sizes", "numbers of nodes such as 2,4,8")
    sizes = tuple(sorted(set(map(int, written.text.split(",")))))
    if min_nodes == max_nodes:
        nodes = f"--nnodes {sizes[0]}:{sizes[-1]}" if 0 < sizes[0] < sizes[-1] else "--nnodes MIN:MAX"
        raise refuse(
            written, f"the job has {counted(min_nodes, 'node')} and no other number", f"{nodes} with it"
        )
    outside = [s for s in sizes if not min_nodes <= s <= max_nodes]
    if outside:
        between = f"sizes from {min_nodes} to {max_nodes}, or another --nnodes"
        raise refuse(written, f"{outside[0]} is not within --nnodes {min_nodes}:{max_nodes}", between)
    if (sizes[0], sizes[-1]) != (min_nodes, max_nodes):
        what = f"the ends of --nnodes {min_nodes}:{max_nodes} are not both among them"
        raise refuse(written, what, f"--nnodes {sizes[0]}:{sizes[-1]} with it")
    return sizes


def _start_size(written: WrittenValue, sizes: tuple[int, ...], min_nodes: int, max_nodes: int) -> int:
    size = scalar_values.count(written)
    if sizes and size not in sizes:
        raise refuse(written, "not an allowed size", f"one of {', '.join(map(str, sizes))}")
    if not min_nodes <= size <= max_nodes:
        what = f"not within --nnodes {min_nodes}:{max_nodes}"
        raise refuse(written, what, f"a number from {min_nodes} to {max_nodes}")
    return size
