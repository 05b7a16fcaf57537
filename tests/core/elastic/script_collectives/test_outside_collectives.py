"""A script's own collectives: what they give in a step and outside, of whole numbers too."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import CollectiveFailed, Communicator, Pending, ReduceOp
from bagua_core.communication.step_interface import StepPlan
from bagua_core.elastic.script_collectives.before_loop import BeforeLoop
from bagua_core.elastic.script_collectives.members_changed import (
    JobClosing,
    MembersChanged,
    PeerLostError,
    placed,
)
from bagua_core.elastic.script_collectives.outside_collectives import OutsideCollectives
from bagua_core.elastic.script_collectives.requests import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Request,
    Scatter,
    Send,
)
from bagua_core.elastic.state.committed_state import CommittedState
from bagua_core.elastic.step.engine import Engine
from bagua_core.elastic.waiting.operation_trail import OperationTrail
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import gloo_world, run_ranks


class Steps:
    """An engine in the middle of a step, or outside."""

    def __init__(
        self, communicator: Communicator, *, in_step: bool, healing: frozenset[int] = frozenset()
    ) -> None:
        self.in_step = in_step
        self.step_failed = False
        self.rounds = None
        self.virtual_shards = 0
        self.plan = StepPlan(1, 5, communicator.global_rank, communicator.world_size, healing)
        self.newcomers: frozenset[int] = frozenset()
        self.failed: list[Exception] = []
        self.operations: list[int] = []
        self.left_out = 0

    def replica_place(self) -> tuple[int, int]:
        return self.plan.global_rank, self.plan.world_size

    def joiner_left_out(self) -> None:
        self.left_out += 1

    def wait(self, pending: Pending) -> None:
        pending.wait()

    def reduction_failed(self, error: Exception) -> None:
        self.failed.append(error)

    def operation_done(self, index: int) -> None:
        self.operations.append(index)


def collectives(communicator: Communicator, steps: Steps) -> OutsideCollectives:
    member: Any = SimpleNamespace(
        replica=None,
        jointly=nullcontext,
        agree=lambda own: own,
        communicator=communicator,
        generation=SimpleNamespace(
            is_gathering=False,
            members=[SimpleNamespace(worker_id=f"w{r}") for r in range(communicator.world_size)],
        ),
        broken=False,
        is_closed=False,
        is_over=False,
        break_generation=lambda error: None,
        follow=lambda outside, given_up: None,
        wait_unlearned=lambda pending: pending.wait(),
        trail=OperationTrail(),
        session=SimpleNamespace(news=SimpleNamespace(nonce="nonce-1")),
        rendezvous=SimpleNamespace(publish=lambda values: None),
    )
    before_loop = BeforeLoop(member)
    before_loop.boundary()
    return OutsideCollectives(steps, CommittedState(), member, before_loop)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [build_in_process, gloo_world], ids=["threads", "sockets"])
def test_averages_in_a_step_and_outside_are_the_same(build: Any, dtype: torch.dtype) -> None:
    signs = [1, 1, 1] if dtype is torch.uint8 else [1, -1, -1]
    brought = [torch.tensor([7, 2, 9]) * s for s in signs]

    def act(communicator: Communicator) -> list[list[float]]:
        own = brought[communicator.global_rank].to(dtype)
        results = []
        for in_step in (True, False):
            steps = Steps(communicator, in_step=in_step)
            result = collectives(communicator, steps).allreduce(own, ReduceOp.AVG)
            assert result.dtype is dtype and result.data_ptr() != own.data_ptr()
            results.append(result.tolist())
        return results

    for inside, outside in run_ranks(build(3), act):
        assert inside == outside
        if not dtype.is_floating_point:
            expected = [7, 2, 9] if dtype is torch.uint8 else [-2, 0, -3]  # towards zero
            assert inside == expected


def test_who_copies_beside_the_step_does_not_count_in_its_average() -> None:
    def act(communicator: Communicator) -> tuple[int, int]:
        steps = Steps(communicator, in_step=True, healing=frozenset({2}))
        brought = torch.tensor(10 + communicator.global_rank)
        result = int(collectives(communicator, steps).allreduce(brought, ReduceOp.AVG))
        return result, steps.left_out

    # (10 + 11) / 2, towards zero; the two that were right are warned, if they divided data by the world size
    assert run_ranks(build_in_process(3), act) == [(10, 1), (10, 1), (10, 0)]


@pytest.mark.parametrize("launched", [False, True])
def test_booleans_have_no_average_and_no_peer_is_asked(launched: bool) -> None:
    alone = build_in_process(2)[0]  # the other never comes
    asked = collectives(alone, Steps(alone, in_step=True)) if launched else Engine(None)
    with pytest.raises(TypeError, match="the average of booleans"):
        asked.allreduce(torch.tensor([True]), ReduceOp.AVG)


def test_a_failure_in_a_step_fails_the_step() -> None:
    world = build_in_process(2)
    steps = Steps(world[0], in_step=True)
    world[1].lose("10.0.0.2")
    own = torch.tensor([3])
    assert collectives(world[0], steps).allreduce(own, ReduceOp.AVG).tolist() == [3]
    assert isinstance(steps.failed[0], CollectiveFailed)


# -- what a change of the members makes of a request: pure decisions

THREE = ("a", "b", "c")
PART = torch.ones(1)


@pytest.mark.parametrize(
    ("request_", "present", "root"),
    [
        (Allreduce(PART, ReduceOp.SUM), ("c",), None),
        (Allgather(PART), ("b", "a"), None),
        (Broadcast(PART, root=2), THREE, 2),
        (Broadcast(PART, root=2), ("c", "a"), 0),
        (Gather(PART, root=1), ("a", "b"), 1),
        (Alltoall(torch.ones(3)), THREE, None),
        (Scatter(PART, None, root=1), THREE, 1),
    ],
)
def test_where_the_root_is_by_now(request_: Request, present: tuple[str, ...], root: int | None) -> None:
    assert placed(request_, THREE, present) == root


@pytest.mark.parametrize(
    ("request_", "present", "lost"),
    [
        (Broadcast(PART, root=2), ("a", "b"), (2,)),
        (Reduce(PART, ReduceOp.MAX, root=0), ("b",), (0,)),
        (Alltoall(torch.ones(3)), ("a",), (1, 2)),
        (ReduceScatter(torch.ones(3), ReduceOp.SUM), ("a", "c"), (1,)),
        (Scatter(PART, None, root=1), ("a", "b"), (2,)),
    ],
)
def test_what_means_nothing_without_the_lost(
    request_: Request, present: tuple[str, ...], lost: tuple[int, ...]
) -> None:
    with pytest.raises(PeerLostError, match="Begin anew") as caught:
        placed(request_, THREE, present)
    assert caught.value.ranks == lost
    for rank in lost:
        assert THREE[rank] in str(caught.value)


def test_parts_for_other_ranks_mean_nothing_either() -> None:
    with pytest.raises(MembersChanged, match="cut for other ranks") as caught:
        placed(Alltoall(torch.ones(3)), THREE, ("b", "a", "c"))
    assert not isinstance(caught.value, PeerLostError)


@pytest.mark.parametrize(
    "request_", [Allreduce(PART, ReduceOp.SUM), Send(PART, 0, root=1)], ids=lambda r: r.name
)
def test_a_loss_after_the_end_of_the_training_is_no_reason_to_call_again(request_: Request) -> None:
    world = build_in_process(2)
    outside = collectives(world[0], Steps(world[0], in_step=False))
    outside._member.broken = outside._member.is_over = True  # type: ignore[misc]
    with pytest.raises(JobClosing, match="the job is closing") as caught:
        outside.request(request_)
    assert not isinstance(caught.value, MembersChanged)
