"""The NCCL communicator on a GPU."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bagua_core.communication.communicator import (
    AbortFlag,
    CollectiveFailed,
)
from bagua_core.communication.nccl.nccl import NcclCommunicator, build_nccl
from tests.core.communication.nccl_worlds import nccl_world, skip_without_nccl
from tests.core.communication.worlds import await_true, run_ranks

# -- on a GPU


@pytest.mark.gpu
def test_work_queued_before_and_after_needs_no_wait_of_the_script() -> None:
    skip_without_nccl(2)
    world = nccl_world(2)

    def act(c: NcclCommunicator) -> list[float]:
        with torch.cuda.stream(torch.cuda.Stream(c.device)):  # type: ignore[no-untyped-call]
            tensor = torch.zeros(1 << 24, device=c.device)
            for _ in range(20):
                tensor += 1.0  # still under way when the reduction is asked for
            c.allreduce(tensor).wait()
            tensor += 1.0
            return [float(tensor.min()), float(tensor.max())]

    assert run_ranks(world, act) == [[41.0, 41.0]] * 2
    for communicator in world:
        communicator.abort("the test is over")


@pytest.mark.gpu
def test_an_abort_on_a_gpu_ends_the_kernels_in_time() -> None:
    skip_without_nccl(2)
    lonely, silent = nccl_world(2)
    tensors = [torch.ones(4, device=c.device) for c in (lonely, silent)]
    run_ranks([0, 1], lambda r: (lonely, silent)[r].allreduce(tensors[r]).wait())  # they are connected
    pending = lonely.allreduce(tensors[0])
    began_s = time.monotonic()
    lonely.abort("lost")
    await_true(pending.is_done, "the kernel to end")
    print(f"ended {time.monotonic() - began_s:.3f} s after the abort")
    silent.abort("the test is over")


@pytest.mark.gpu
def test_a_peer_that_does_not_join_is_given_up() -> None:
    skip_without_nccl(2)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(CollectiveFailed, match="meeting for NCCL"):
        build_nccl(1, 0, 2, store, torch.device("cuda", 0), 1.0, AbortFlag())
