"""Jobs on a real GPU, over the real NCCL: what holds of a job on the CPU holds there. Two ranks share one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from bagua_core.communication.nccl import nccl_library
from bagua_core.communication.nccl.nccl_library import NcclUnavailableError
from tests.faults.conftest import MakeJob
from tests.faults.job import Job, Node

pytestmark = pytest.mark.gpu

SCRIPT = Path(__file__).with_name("train_on_gpu.py")
START_S = 120.0  # CUDA, CuPy and NCCL are loaded in every worker
BY_NCCL = "bagua: tensors of GPUs travel by NCCL"
QUIET = {"NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def nccl() -> None:
    try:
        nccl_library.load()
    except NcclUnavailableError as error:
        pytest.skip(str(error))


def started(
    job: MakeJob, algorithm: str = "gradient_allreduce", more: Mapping[str, str] = MappingProxyType({})
) -> tuple[Job, Node]:
    one = job(file=SCRIPT, script=["--algorithm", algorithm])
    node = one.start(slots=2, environment={**QUIET, **more})
    one.await_world(2, deadline_s=START_S)
    one.await_step(20, deadline_s=START_S)
    return one, node


def lose_one_and_get_another(one: Job, node: Node) -> None:
    victim = node.workers[1]
    victim.kill()
    node.await_line("worker in slot 1 ended: killed by SIGKILL")
    one.await_world(2, after_step=one.await_world(1, deadline_s=START_S), deadline_s=START_S)
    assert node.workers[1].worker_id != victim.worker_id


@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad"])
def test_a_worker_is_killed_and_another_comes_in(job: MakeJob, algorithm: str) -> None:
    one, node = started(job, algorithm)
    assert node.says(BY_NCCL)
    lose_one_and_get_another(one, node)
    one.finish(deadline_s=START_S)
    one.check(finished=2)


def test_without_nccl_the_same_goes_by_way_of_the_cpu(job: MakeJob) -> None:
    one, node = started(job, more={"BAGUA_TRANSPORT": "gloo"})
    assert not node.says(BY_NCCL)
    lose_one_and_get_another(one, node)
    one.finish(deadline_s=START_S)
    one.check(finished=2)


@pytest.mark.usefixtures("nccl")
def test_insisting_on_nccl_is_no_harm_where_it_can_be(job: MakeJob) -> None:
    one, node = started(job, more={"BAGUA_TRANSPORT": "nccl"})
    assert node.says(BY_NCCL)
    one.finish(deadline_s=START_S)
    one.check(finished=2)
