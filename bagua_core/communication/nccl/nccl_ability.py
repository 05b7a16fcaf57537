"""Determines whether this worker can use NCCL, and what the other workers must know for that.

Owns reading the machine: CuPy, libnccl, the GPU's address, the environment that NCCL itself reads; and what members'
answers mean together. The choice is transport_choice.py's. Imports CuPy only for a script that has something on a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bagua_core.communication.nccl import nccl_join, nccl_library
from bagua_core.communication.nccl.nccl_library import NcclUnavailableError
from bagua_core.communication.transport_choice import Ability, Facts

SEVERAL_RANKS_A_GPU = 23000
"""NCCL can from this version on, if it is enabled."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def ability(gpus: Sequence[torch.device]) -> Ability:
    """Returns this worker's report about NCCL. gpus: those that this worker's script uses.

    Facts: version as NCCL numbers it; gpu, its name among all GPUs of the job, as NCCL tells them apart; may_share, not
    empty where other ranks may use the same one.
    """
    if len(gpus) > 1:
        names = ", ".join(map(str, gpus))
        return Ability(f"a worker's models lie on {names}; run one worker for each GPU to use NCCL")
    try:
        nccl = nccl_library.load()
    except NcclUnavailableError as error:
        return Ability(str(error))
    version = int(nccl.module.get_version())
    if not nccl_join.can_be_given_up(nccl, nccl_library.loaded_library()):
        return Ability(
            f"joining could not be given up with NCCL {version} and this CuPy; install NCCL 2.14 or newer and CuPy 14"
        )
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and version >= SEVERAL_RANKS_A_GPU
    gpu = f"{_host(os.environ)} {gpu_address(gpus[0])}"
    return Ability("", {"version": str(version), "gpu": gpu, "may_share": "yes" if shares else ""})


def title(said: Sequence[Facts]) -> str:
    return f"NCCL {_version(said[0]['version'])}"


def against(said: Sequence[Facts]) -> str | None:
    """Returns why members with these facts can't use NCCL together, with what to do; None if they can. Pure."""
    versions = sorted({facts["version"] for facts in said})
    if len(versions) > 1:
        names = " and ".join(map(_version, versions))
        return f"members have NCCL {names}; install the same nvidia-nccl on all nodes"
    by_gpu: dict[str, list[int]] = {}
    for global_rank, facts in enumerate(said):
        by_gpu.setdefault(facts["gpu"], []).append(global_rank)
    for gpu, ranks in by_gpu.items():
        if len(ranks) > 1 and not all(said[r]["may_share"] for r in ranks):
            return (
                f"global ranks {ranks} use one GPU ({gpu}), which NCCL refuses. Give each its own (slot i of a node: "
                "torch.cuda.set_device(local rank)), or each its own NCCL_HOSTID"
            )
    return None


def _version(number: str) -> str:
    """Returns the text of a version's number: 22707 is 2.27.7."""
    return f"{int(number) // 10000}.{int(number) // 100 % 100}.{int(number) % 100}"


def gpu_address(device: torch.device) -> str:
    """Returns the GPU's address on its host. The parts of one GPU have one address, and NCCL takes them for one."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    return str(properties.uuid)


def _host(environ: Mapping[str, str]) -> str:
    """Returns this host's identity, by which NCCL distinguishes hosts."""
    told = environ.get("NCCL_HOSTID")
    if told:
        return told
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
