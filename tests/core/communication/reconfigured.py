"""A world of GlooCommunicators on groups that took other members in their process (torch 2.14 and later, experimental).

Each rank's group is formed with one member more, and then reconfigured without that member. benchmarks/group_rebuild.py
has the measurements for which the runtime makes a new group instead.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.transports.gloo import GlooCommunicator
from tests.core.communication.worlds import run_ranks

TIMEOUT_S = 8.0


def can_reconfigure() -> bool:
    """Whether this torch's Gloo can give a group other members."""
    return hasattr(dist.ProcessGroupGloo, "reconfigure")


def reconfigured_world(world_size: int) -> list[GlooCommunicator]:
    store = dist.HashStore()
    groups = run_ranks(range(world_size + 1), lambda rank: _group(store, rank, world_size + 1))
    for number, members in ((1, groups), (2, groups[:-1])):
        handles = [group.get_reconfigure_handle() for group in members]  # another one after each change
        run_ranks(members, partial(_form, number=number, handles=handles))
    return [
        GlooCommunicator(group, 2, rank, world_size, AbortFlag(), TIMEOUT_S)
        for rank, group in enumerate(groups[:-1])
    ]


def _group(store: dist.Store, rank: int, world_size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=TIMEOUT_S)
    options._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    options.enable_reconfigure = True
    return gloo(store, rank, world_size, options)


def _form(group: Any, number: int, handles: list[str]) -> None:
    """Every member calls it. Ranks are places in `handles`."""
    options: Any = dist.distributed_c10d.ReconfigureOptions()  # type: ignore[attr-defined]
    options.uuid = number
    options.handles = handles
    options.timeout = timedelta(seconds=TIMEOUT_S)
    group.reconfigure(options).wait()
