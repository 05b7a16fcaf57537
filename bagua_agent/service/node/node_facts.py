"""Reads the facts of this node: slots, GPUs, and the id of its boot."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pynvml

from bagua_agent.base.driver_gpus import gpus_of_the_driver
from bagua_agent.base.errors import UserError
from bagua_agent.service.config.agent_config import AgentConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The facts of a node. slots: the workers that it can run."""

    slots: int
    gpus: int
    boot_id: str


def gpus_by_nvml() -> int | None:
    """Returns the number of GPUs that a process here can use, in a container perhaps fewer than the driver lists; None
    if NVML can't tell."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver, or one that does not answer
        return None
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def look_at_node(config: AgentConfig) -> NodeFacts:
    """Reads the facts of this node. Raises UserError if the configuration asks for what is not there."""
    by_nvml = gpus_by_nvml()
    # A driver that lists what NVML can't see is in trouble, which is for node_checks.py to say.
    gpus = gpus_of_the_driver() if by_nvml is None else by_nvml
    wanted = config.node_slots
    if wanted == "gpu":
        if not gpus:
            raise UserError(
                'node.slots "gpu": no GPU is visible on this node; load its driver, or give a number or "cpu"'
            )
        slots = gpus
    elif wanted == "cpu":
        slots = len(os.sched_getaffinity(0))
    else:
        slots = int(wanted)
        if gpus and slots > gpus:
            raise UserError(f"node.slots {slots}: this node has {gpus} GPUs; give at most as many")
    return NodeFacts(slots, gpus, _BOOT_ID.read_text().strip())
