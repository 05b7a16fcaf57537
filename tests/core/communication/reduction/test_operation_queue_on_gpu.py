"""On a GPU: jobs of the operation queue, rounds and handovers keep the order of a script's own streams."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.devices.device_order import Handover
from bagua_core.communication.reduction.operation_queue import Job, OperationQueue
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.communication.transports.staged import Staged
from bagua_core.communication.weights.background_average import Round
from tests.core.communication.worlds import DEADLINE_S, in_process_world

pytestmark = pytest.mark.gpu

SIZE = 1 << 24
ADDITIONS = 50


@pytest.fixture(autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def alone() -> Communicator:
    (of_cpu,) = in_process_world(1)
    return ByDevice(of_cpu, Staged(of_cpu))


def filled_slowly() -> torch.Tensor:
    """ADDITIONS everywhere, once the current stream is done with it."""
    tensor = torch.zeros(SIZE, device="cuda")
    for _ in range(ADDITIONS):
        tensor += 1.0
    return tensor


def doubling(tensor: torch.Tensor) -> Job:
    tensor.mul_(2.0)
    yield from ()


def range_of(tensor: torch.Tensor) -> list[float]:
    return [float(tensor.min()), float(tensor.max())]


@pytest.mark.parametrize("follows", [False, True])
def test_a_job_comes_after_the_launch_and_before_the_waiting_stream(follows: bool) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor = filled_slowly()
        pending = OperationQueue().launch(alone(), doubling(tensor), (tensor,))
        if follows:
            pending.follow()
        else:
            pending.wait()
        tensor += 1.0
        assert range_of(tensor) == [2.0 * ADDITIONS + 1] * 2


def test_a_round_comes_after_its_inputs_and_is_done_when_it_says_so() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor = filled_slowly()
        under_way = Round(alone(), [tensor])
        assert under_way.wait(DEADLINE_S) and under_way.error is None
        tensor += 1.0
        assert range_of(tensor) == [ADDITIONS + 1.0] * 2


def test_a_handover_keeps_the_order() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        tensor = filled_slowly()
        copy = torch.zeros_like(tensor)
        handover = Handover([tensor, copy])

        def take() -> None:
            with handover.taken_over():
                copy.copy_(tensor)

        thread = threading.Thread(target=take)
        thread.start()
        thread.join(DEADLINE_S)
        assert range_of(copy + 1.0) == [ADDITIONS + 1.0] * 2
