"""Defines the interface of the transports of GPU tensors to the rendezvous, and the list from which a generation
chooses.

A further transport is a class and a call of `register`, or a line in TRANSPORTS.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, Communicator
from bagua_core.communication.nccl import nccl_ability
from bagua_core.communication.nccl.nccl import build_nccl
from bagua_core.communication.transport_choice import (
    AUTO,
    GLOO,
    Ability,
    Compared,
    Facts,
    Statement,
)


class GpuTransport(Compared, Protocol):
    """A transport for tensors of GPUs. `name`, `title` and `against` are those of transport_choice.Compared."""

    def ability(self, gpus: Sequence[torch.device]) -> Ability:
        """Returns whether this worker can use the transport. gpus: those that its script uses, at least one. Fast where
        it can't, and without memory of a GPU."""

    def build(
        self,
        generation: int,
        global_rank: int,
        world_size: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        abort_flag: AbortFlag,
    ) -> Communicator:
        """Returns this rank's communicator among world_size; all ranks call it at about the same time.

        store: shared by the ranks, with keys for this communicator alone. Raises CollectiveFailed if the ranks do not
        meet within timeout_s, CollectiveAborted as soon as abort_flag is set.
        """


class NcclTransport:
    name = "nccl"

    def title(self, said: Sequence[Facts]) -> str:
        return nccl_ability.title(said)

    def against(self, said: Sequence[Facts]) -> str | None:
        return nccl_ability.against(said)

    def ability(self, gpus: Sequence[torch.device]) -> Ability:
        return nccl_ability.ability(gpus)

    def build(
        self,
        generation: int,
        global_rank: int,
        world_size: int,
        store: Store,
        device: torch.device,
        timeout_s: float,
        abort_flag: AbortFlag,
    ) -> Communicator:
        return build_nccl(generation, global_rank, world_size, store, device, timeout_s, abort_flag)


TRANSPORTS: list[GpuTransport] = [NcclTransport()]
"""The preferred one first."""


def register(transport: GpuTransport) -> None:
    """Registers a transport for GPU tensors, which is preferred to those there are; it replaces one of its name.

    To be called on every worker before `init_process_group()`. The members of a generation use it if all can;
    BAGUA_TRANSPORT=<its name> insists on it. Raises ValueError for a name that BAGUA_TRANSPORT uses otherwise.
    """
    if transport.name in (AUTO, GLOO):
        raise ValueError(f"a transport can't be called {transport.name!r}: BAGUA_TRANSPORT uses it otherwise")
    TRANSPORTS[:] = [transport, *(t for t in TRANSPORTS if t.name != transport.name)]


def statement(setting: str, gpus: Sequence[torch.device], transports: Sequence[GpuTransport]) -> Statement:
    """Returns this worker's statement about the transports. gpus: those that its script uses."""
    asked = [t for t in transports if gpus and setting in (AUTO, t.name)]
    return Statement(setting, bool(gpus), {t.name: t.ability(gpus) for t in asked})
