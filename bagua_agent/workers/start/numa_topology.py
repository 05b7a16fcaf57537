"""Reads the machine's processors, NUMA nodes, caches and GPUs from /sys.

GPUs are NVIDIA's, in the order of their PCI addresses, which is CUDA's for equal devices; those that
CUDA_VISIBLE_DEVICES names by number count in its order. Decides nothing: see numa_binding.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.workers.start.numa_binding import Processor, Topology

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers


def read_topology(environ: Mapping[str, str], *, sys_dir: Path = Path("/sys")) -> Topology:
    """Reads the topology of the processors that this process may use. Raises UserError when the machine does not
    describe it."""
    usable = os.sched_getaffinity(0)
    try:
        processors = tuple(
            _processor(sys_dir, cpu, node)
            for node, cpus in sorted(_numa_nodes(sys_dir).items())
            for cpu in sorted(cpus & usable)
        )
        if not processors:
            raise FileNotFoundError(f"{sys_dir}/devices/system/node lists no usable processor")
        return Topology(processors, _visible(_gpu_nodes(sys_dir), environ.get("CUDA_VISIBLE_DEVICES")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"--numa-binding: this machine does not describe its NUMA nodes ({error}); leave the flag out"
        ) from error


def cpu_list(text: str) -> frozenset[int]:
    """Parses Linux's form: "0-2,5" -> {0, 1, 2, 5}. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _numa_nodes(sys_dir: Path) -> dict[int, frozenset[int]]:
    nodes = (sys_dir / "devices/system/node").glob("node[0-9]*")
    return {int(node.name[4:]): cpu_list((node / "cpulist").read_text()) for node in nodes}


def _processor(sys_dir: Path, cpu: int, numa_node: int) -> Processor:
    directory = sys_dir / f"devices/system/cpu/cpu{cpu}"
    siblings = cpu_list((directory / "topology/thread_siblings_list").read_text())
    socket = int((directory / "topology/physical_package_id").read_text())
    return Processor(cpu, numa_node, socket, min(siblings), min(_last_level_cache(directory, siblings)))


def _last_level_cache(directory: Path, otherwise: frozenset[int]) -> frozenset[int]:
    """Returns the processors that share the last-level cache. Some virtual machines describe no caches: then each core
    is its own."""
    best, shared = 0, otherwise
    for index in directory.glob("cache/index[0-9]*"):
        if (index / "type").read_text().strip() not in ("Unified", "Data"):
            continue
        level = int((index / "level").read_text())
        if level > best:
            best, shared = level, cpu_list((index / "shared_cpu_list").read_text())
    return shared


def _gpu_nodes(sys_dir: Path) -> list[int]:
    nodes = []
    for device in sorted((sys_dir / "bus/pci/devices").glob("*")):
        if (device / "vendor").read_text().strip() != NVIDIA:
            continue
        if (device / "class").read_text().strip()[:6] in DISPLAY_CLASSES:
            nodes.append(max(0, int((device / "numa_node").read_text())))  # -1: the machine has one node
    return nodes


def _visible(gpu_nodes: list[int], visible_devices: str | None) -> tuple[int, ...]:
    if visible_devices is None or not gpu_nodes:
        return tuple(gpu_nodes)
    numbers = [part.strip() for part in visible_devices.split(",") if part.strip()]
    if not all(number.isdigit() and int(number) < len(gpu_nodes) for number in numbers):
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible_devices} does not name GPUs by their numbers")
    return tuple(gpu_nodes[int(number)] for number in numbers)
