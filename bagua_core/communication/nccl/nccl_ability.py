"""States whether this worker can use NCCL, and what the other workers must know for that.

Owns reading the machine: CuPy, libnccl, the GPU's address, the environment that NCCL itself reads. What follows from
all members' answers is transport_choice.py's. Imports CuPy only for a script that has something on a GPU.
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
from bagua_core.communication.transport_choice import Setting, Statement

SEVERAL_RANKS_A_GPU = 23000
"""NCCL can from this version on, if it is enabled."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def statement(setting: Setting, gpus: Sequence[torch.device]) -> Statement:
    """gpus: that this worker's script uses."""
    if setting is Setting.GLOO or not gpus:
        return Statement(setting, bool(gpus))
    if len(gpus) > 1:
        names = ", ".join(map(str, gpus))
        return Statement(
            setting, True, f"a worker's models lie on {names}; run one worker for each GPU to use NCCL"
        )
    try:
        nccl = nccl_library.load()
    except NcclUnavailableError as error:
        return Statement(setting, True, str(error))
    version = int(nccl.module.get_version())
    if not nccl_join.can_be_given_up(nccl, nccl_library.loaded_library()):
        return Statement(
            setting,
            True,
            f"joining could not be given up with NCCL {version} and this CuPy; install NCCL 2.14 or newer and CuPy 14",
        )
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and version >= SEVERAL_RANKS_A_GPU
    return Statement(setting, True, "", version, f"{_host(os.environ)} {gpu_address(gpus[0])}", shares)


def gpu_address(device: torch.device) -> str:
    """On its host. The parts of one GPU have one address, and NCCL takes them for one."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}"
    return str(properties.uuid)


def _host(environ: Mapping[str, str]) -> str:
    """As NCCL tells hosts apart."""
    told = environ.get("NCCL_HOSTID")
    if told:
        return told
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"
