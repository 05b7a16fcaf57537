"""Tensors that go by way of the host: the copies, beyond what the contract asks."""

from __future__ import annotations

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted, Communicator
from bagua_core.communication.transports.by_device import ByDevice
from bagua_core.communication.transports.staged import Staged
from tests.core.communication.worlds import await_true, in_process_world, run_ranks


def staged_world(world_size: int) -> list[Communicator]:
    return [Staged(c) for c in in_process_world(world_size)]


def test_the_result_is_in_place_once_it_was_waited_for_and_not_before() -> None:
    def act(c: Communicator) -> tuple[float, float, float]:
        tensor = torch.full((3,), c.global_rank + 1.0)
        pending = c.allreduce(tensor)
        await_true(pending.is_done, "the reduction to be done")
        before = float(tensor[0])
        pending.wait()
        after = float(tensor[0])
        tensor.fill_(9.0)
        pending.wait()  # the script may ask again; the tensor is its own by now
        return before, after, float(tensor[0])

    assert run_ranks(staged_world(2), act) == [(1.0, 3.0, 9.0), (2.0, 3.0, 9.0)]


def test_an_operation_that_was_given_up_never_reaches_the_tensor() -> None:
    lonely, late = staged_world(2)
    tensor = torch.ones(3)
    pending = lonely.allreduce(tensor)
    lonely.abort("lost")
    with pytest.raises(CollectiveAborted, match="lost"):
        pending.wait()
    late.allreduce(torch.ones(3))
    assert tensor.tolist() == [1.0] * 3


def test_what_is_sent_is_what_it_was_when_it_was_sent() -> None:
    def act(c: Communicator) -> float:
        tensor = torch.full((4,), c.global_rank + 1.0)
        if c.global_rank == 0:
            pending = c.send(tensor, 1, 7)
            tensor.zero_()
        else:
            pending = c.receive(tensor, 0, 7)
        pending.wait()
        return float(tensor[0])

    assert run_ranks(staged_world(2), act) == [0.0, 1.0]


def test_it_needs_nothing_of_its_own_beside_the_cpus() -> None:
    (one,) = in_process_world(1)
    both = ByDevice(one, Staged(one))
    both.close()
    assert both.abort_flag is one.abort_flag
