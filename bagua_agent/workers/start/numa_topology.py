"""Reads the machine's processors, NUMA nodes and caches from /sys, and which GPUs workers have from nvidia-smi.

GPUs are NVIDIA's, in the order of their PCI addresses, which is CUDA's for equal devices; those that
CUDA_VISIBLE_DEVICES names count in its order. /sys lists all GPUs of the host, also in a container or a step of Slurm
that has some of them; nvidia-smi lists those. Decides nothing: see numa_binding.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.workers.start.numa_binding import Processor, Topology

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers
NVIDIA_SMI_TIMEOUT_S = 20.0
_PCI_ADDRESS = re.compile(r"([0-9a-f]+):([0-9a-f]+:[0-9a-f]+\.[0-9a-f]+)")


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A GPU that workers here can use. uuid: empty where nvidia-smi does not tell it."""

    numa_node: int
    uuid: str = ""


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
        gpus = _usable_gpus(sys_dir)
        if gpus is None:
            gpus = [_Gpu(_numa_node(device)) for device in _nvidia_devices(sys_dir)]
        return Topology(processors, _visible(gpus, environ.get("CUDA_VISIBLE_DEVICES")))
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


def _usable_gpus(sys_dir: Path) -> list[_Gpu] | None:
    """Returns the GPUs that nvidia-smi lists; None where there is none, it fails, or /sys lacks a GPU of the list, as
    in WSL2. Raises UserError if it does not end."""
    # of the agent's own PATH: that of a job may be another account's
    if (program := shutil.which("nvidia-smi")) is None:
        return None
    try:
        answer = subprocess.run(
            [program, "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"--numa-binding: {program} does not answer; leave the flag out") from error
    if answer.returncode != 0:
        return None
    gpus = []
    for line in answer.stdout.splitlines():
        if not line.startswith("GPU-"):
            continue
        uuid, _, address = line.partition(", ")
        device = _pci_device(sys_dir, address)
        if device is None:
            return None
        gpus.append(_Gpu(_numa_node(device), uuid))
    return gpus


def _pci_device(sys_dir: Path, address: str) -> Path | None:
    """Returns the directory of a device; None where there is none. address: as nvidia-smi writes it, 00000000:0A:00.0;
    /sys has 0000:0a:00.0."""
    if (found := _PCI_ADDRESS.fullmatch(address.strip().lower())) is None:
        return None
    device = sys_dir / f"bus/pci/devices/{int(found[1], 16):04x}:{found[2]}"
    return device if device.is_dir() else None


def _nvidia_devices(sys_dir: Path) -> list[Path]:
    return [
        device
        for device in sorted((sys_dir / "bus/pci/devices").glob("*"))
        if (device / "vendor").read_text().strip() == NVIDIA
        and (device / "class").read_text().strip()[:6] in DISPLAY_CLASSES
    ]


def _numa_node(device: Path) -> int:
    return max(0, int((device / "numa_node").read_text()))  # -1: the machine has one node


def _visible(gpus: Sequence[_Gpu], visible_devices: str | None) -> tuple[int, ...]:
    if visible_devices is None or not gpus:
        return tuple(gpu.numa_node for gpu in gpus)
    names = [part.strip() for part in visible_devices.split(",") if part.strip()]
    found = [_named(gpus, name) for name in names]
    if not all(len(each) == 1 for each in found):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={visible_devices} does not name GPUs here by their numbers or UUIDs"
        )
    return tuple(gpu.numa_node for (gpu,) in found)


def _named(gpus: Sequence[_Gpu], name: str) -> list[_Gpu]:
    """Returns the GPUs that an entry of CUDA_VISIBLE_DEVICES may mean; it may be the beginning of a UUID."""
    if name.isdigit():
        return list(gpus[int(name) : int(name) + 1])
    return [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
