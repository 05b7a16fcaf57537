"""What has this node: slots, GPUs; and which boot is this?"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.errors import UserError
from bagua_agent.service.agent_config import AgentConfig

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """slots: workers it can run."""

    slots: int
    gpus: int
    boot_id: str


def gpus_of_the_driver() -> int:
    """That the kernel's driver lists, whether they work or not."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def look_at_node(config: AgentConfig) -> NodeFacts:
    """Raises UserError if the configuration asks for what is not there."""
    gpus = gpus_of_the_driver()
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
