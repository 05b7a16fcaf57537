"""Worlds over NCCL: all ranks in threads of the test's process, on one GPU or on as many as there are."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed import HashStore

from bagua_core.communication.communicator import AbortFlag, Communicator
from bagua_core.communication.nccl import nccl_library
from bagua_core.communication.nccl.nccl import NcclCommunicator, build_nccl
from bagua_core.communication.nccl.nccl_ability import SEVERAL_RANKS_A_GPU
from bagua_core.communication.nccl.nccl_library import NcclUnavailableError
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.communication.transports.staged import Staged
from tests.core.communication.worlds import gloo_world, in_process_world, run_ranks

TIMEOUT_S = 8.0


def skip_without_nccl(ranks: int = 3) -> None:
    """Skips the test, with the reason, where `ranks` ranks can't talk over NCCL."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        version = nccl_library.load().module.get_version()
    except NcclUnavailableError as error:
        pytest.skip(str(error))
    if torch.cuda.device_count() < ranks and version < SEVERAL_RANKS_A_GPU:
        pytest.skip(f"NCCL {version} runs one rank a GPU, and there are {torch.cuda.device_count()}")


def nccl_world(world_size: int, generation: int = 1) -> list[NcclCommunicator]:
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    store = HashStore()

    def build(global_rank: int) -> NcclCommunicator:
        device = torch.device("cuda", global_rank % torch.cuda.device_count())
        return build_nccl(generation, global_rank, world_size, store, device, TIMEOUT_S, AbortFlag())

    return run_ranks(range(world_size), build)


def by_device_world(world_size: int, generation: int = 1) -> list[Communicator]:
    """CPU tensors over Gloo beside a second transport that gets none here."""
    of_gpu = in_process_world(world_size, generation)
    of_cpu = gloo_world(world_size, generation)
    for cpu, gpu in zip(of_cpu, of_gpu, strict=True):
        gpu.abort_flag = cpu.abort_flag
    return [ByDevice(cpu, gpu) for cpu, gpu in zip(of_cpu, of_gpu, strict=True)]


def staged_world(world_size: int, generation: int = 1) -> list[Communicator]:
    """Tensors that go by way of the host, which is where they are here: the copies are made all the same."""
    return [Staged(c) for c in gloo_world(world_size, generation)]
