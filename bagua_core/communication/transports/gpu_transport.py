"""The interface of the GPU transport to the rendezvous: NCCL, or a test's replacement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, Communicator
from bagua_core.communication.nccl import nccl_ability
from bagua_core.communication.nccl.nccl import build_nccl
from bagua_core.communication.transport_choice import Setting, Statement


class GpuTransport(Protocol):
    def statement(self, setting: Setting, gpus: Sequence[torch.device]) -> Statement:
        """See nccl_ability.statement."""

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
        """See nccl.build_nccl."""


class NcclTransport:
    def statement(self, setting: Setting, gpus: Sequence[torch.device]) -> Statement:
        return nccl_ability.statement(setting, gpus)

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
