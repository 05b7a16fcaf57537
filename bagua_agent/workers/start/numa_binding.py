"""Chooses the processors of each worker: `--numa-binding`, as torchrun documents it. Pure.

A worker belongs to the NUMA node of the GPU with its slot's index; on a node without GPUs (or with fewer than
workers) the slots are spread over the NUMA nodes in order. How a machine is built is read in numa_topology.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bagua_agent.base.errors import InternalError, UserError


@dataclass(frozen=True, slots=True)
class Processor:
    """One logical processor that this process may use.

    core, cache: the least id of the processors that share its physical core, and its last-level cache.
    """

    cpu: int
    numa_node: int
    socket: int
    core: int
    cache: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The processors and GPUs of a machine. gpu_numa_nodes: of every GPU, in the order of CUDA's device numbers; empty
    without GPUs."""

    processors: tuple[Processor, ...]
    gpu_numa_nodes: tuple[int, ...] = ()


def processors_of_slot(binding: str, slot: int, slots: int, topology: Topology) -> frozenset[int]:
    """Returns the processors for the worker at `slot` of `slots`; never empty.

    binding: node, socket, exclusive or core-complex. exclusive shares a NUMA node's cores among the devices on it, so
    that no two have a core in common; core-complex gives each device one last-level cache of its node, the same one to
    several only if there are more devices than caches. Raises UserError when the machine cannot be divided so.
    """
    if not 0 <= slot < slots:
        raise InternalError(f"slot {slot} is not below {slots}")
    device_nodes = _device_nodes(slots, topology)
    node = device_nodes[slot]
    here = [p for p in topology.processors if p.numa_node == node]
    if not here:
        raise UserError(f"--numa-binding: none of NUMA node {node}'s processors may be used by slot {slot}")
    sharers = [device for device, its_node in enumerate(device_nodes) if its_node == node]
    place = sharers.index(slot)
    if binding == "node":
        return frozenset(p.cpu for p in here)
    if binding == "socket":
        socket = min(here, key=lambda p: p.cpu).socket
        return frozenset(p.cpu for p in topology.processors if p.socket == socket)
    if binding == "exclusive":
        cores = _grouped(here, lambda p: p.core)
        return _share(list(cores.values()), place, len(sharers), node)
    if binding == "core-complex":
        caches = _grouped(here, lambda p: p.cache)
        # the largest first: some of a cache's processors may not be ours to use
        by_size = sorted(caches.items(), key=lambda item: (-len(item[1]), item[0]))
        return frozenset(by_size[place % len(by_size)][1])
    raise UserError(f"--numa-binding {binding!r} is not node, socket, exclusive or core-complex")


def _device_nodes(slots: int, topology: Topology) -> list[int]:
    if len(topology.gpu_numa_nodes) >= slots:
        return list(topology.gpu_numa_nodes)
    nodes = sorted({p.numa_node for p in topology.processors})
    if not nodes:
        raise UserError("--numa-binding: this machine does not say which processors are in which NUMA node")
    return [nodes[slot * len(nodes) // slots] for slot in range(slots)]


def _grouped(processors: Iterable[Processor], key: Callable[[Processor], int]) -> dict[int, set[int]]:
    groups: dict[int, set[int]] = {}
    for processor in processors:
        groups.setdefault(key(processor), set()).add(processor.cpu)
    return dict(sorted(groups.items()))


def _share(cores: list[set[int]], place: int, sharers: int, node: int) -> frozenset[int]:
    if len(cores) < sharers:
        raise UserError(
            f"--numa-binding exclusive: NUMA node {node} has {len(cores)} cores for {sharers} devices;"
            " use node, or fewer workers"
        )
    each, left_over = divmod(len(cores), sharers)  # the first ones get one more
    begin = place * each + min(place, left_over)
    end = begin + each + (place < left_over)
    return frozenset(cpu for core in cores[begin:end] for cpu in core)
