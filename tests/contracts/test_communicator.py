"""What every communicator promises, whatever carries the bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator, ReduceOp
from tests.core.communication.worlds import await_true, gloo_world, in_process_world, run_ranks

RELEASE_S = 0.05
World = Callable[[int], list[Communicator]]


@pytest.fixture(params=["gloo", "in_process"])
def world(request: pytest.FixtureRequest) -> World:
    build: Any = {"gloo": gloo_world, "in_process": in_process_world}[request.param]
    return build


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_allreduce_reduces_in_place(world: World, world_size: int) -> None:
    operands = torch.arange(1.0, world_size + 1)
    expected = {
        ReduceOp.SUM: operands.sum(),
        ReduceOp.AVG: operands.mean(),
        ReduceOp.MIN: operands.min(),
        ReduceOp.MAX: operands.max(),
        ReduceOp.PRODUCT: operands.prod(),
    }

    def act(c: Communicator) -> dict[ReduceOp, torch.Tensor]:
        results = {}
        for op in ReduceOp:
            tensor = torch.full((3, 2), c.global_rank + 1.0)
            c.allreduce(tensor, op).wait()
            results[op] = tensor
        return results

    for results in run_ranks(world(world_size), act):
        for op in ReduceOp:
            torch.testing.assert_close(results[op], expected[op].expand(3, 2))


def test_all_ranks_get_the_same_bits(world: World) -> None:
    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.randn(10_007, generator=torch.Generator().manual_seed(c.global_rank))
        c.allreduce(tensor).wait()
        return tensor

    first, *others = run_ranks(world(3), act)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_types_that_can_be_reduced(world: World, dtype: torch.dtype) -> None:
    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.full((5,), c.global_rank + 1).to(dtype)
        c.allreduce(tensor).wait()
        return tensor

    assert all(torch.equal(t, torch.full((5,), 3).to(dtype)) for t in run_ranks(world(2), act))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_any_type_and_shape_is_moved(world: World, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    def act(c: Communicator) -> None:
        own = torch.full(shape, c.global_rank).to(dtype)
        sent = torch.full(shape, 1).to(dtype)
        c.broadcast(own, source=1).wait()
        assert torch.equal(own, sent)
        gathered = torch.zeros((2, *shape), dtype=dtype)
        c.allgather(gathered, torch.full(shape, c.global_rank).to(dtype)).wait()
        assert torch.equal(gathered, torch.stack([torch.full(shape, r).to(dtype) for r in range(2)]))
        other = 1 - c.global_rank
        received = torch.zeros(shape, dtype=dtype)
        receiving = c.receive(received, other, tag=3)
        c.send(torch.full(shape, 1).to(dtype), other, tag=3).wait()
        receiving.wait()
        assert torch.equal(received, sent)

    run_ranks(world(2), act)


def test_tags_keep_messages_apart(world: World) -> None:
    def act(c: Communicator) -> list[float]:
        if c.global_rank == 0:
            pendings = [c.send(torch.tensor([float(tag)]), 1, tag) for tag in (1, 2)]
            for pending in pendings:
                pending.wait()
            return []
        tensors = {tag: torch.zeros(1) for tag in (2, 1)}
        for pending in [c.receive(t, 0, tag) for tag, t in tensors.items()]:
            pending.wait()
        return [float(tensors[1]), float(tensors[2])]

    assert run_ranks(world(2), act)[1] == [1.0, 2.0]


def test_several_operations_under_way(world: World) -> None:
    def act(c: Communicator) -> list[float]:
        tensors = [torch.full((100,), float(i)) for i in range(8)]
        pendings = [c.allreduce(t) for t in tensors]
        for pending in reversed(pendings):
            pending.wait()
            assert pending.is_done()
            pending.wait()  # once more is harmless
        return [float(t[0]) for t in tensors]

    assert run_ranks(world(2), act) == [[2.0 * i for i in range(8)]] * 2


def test_waiting_in_another_thread_averages_once(world: World) -> None:
    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.full((4,), 6.0)
        pending = c.allreduce(tensor, ReduceOp.AVG)
        run_ranks(range(3), lambda _: pending.wait())
        return tensor

    assert all(torch.equal(t, torch.full((4,), 6.0)) for t in run_ranks(world(2), act))


def start_alone(kind: str, c: Communicator) -> Any:
    return {
        "allreduce": lambda: c.allreduce(torch.ones(4)),
        "broadcast": lambda: c.broadcast(torch.ones(4), source=1),
        "allgather": lambda: c.allgather(torch.zeros(2, 4), torch.ones(4)),
        "receive": lambda: c.receive(torch.ones(4), source=1, tag=9),
    }[kind]()


def finish_alone(kind: str, c: Communicator) -> Any:
    """The other side of start_alone, so that nothing is left running when the test ends."""
    if kind == "receive":
        return c.send(torch.ones(4), destination=0, tag=9)
    return start_alone(kind, c)


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather", "receive"])
def test_abort_releases_a_wait_on_a_silent_peer(world: World, kind: str) -> None:
    lonely, silent = world(2)
    pending = start_alone(kind, lonely)
    stalls: list[float] = []
    released: list[tuple[float, Exception]] = []

    def wait() -> None:
        try:
            pending.wait(stalls.append, stall_after_s=0.01)
        except CollectiveAborted as error:
            released.append((time.monotonic(), error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    await_true(lambda: len(stalls) >= 3, "three reports of a stall")
    assert 0.01 <= stalls[0] < stalls[1] < stalls[2]
    aborted_s = time.monotonic()
    lonely.abort("a loss, says the test")
    waiter.join(5.0)
    assert not waiter.is_alive()
    assert released[0][0] - aborted_s < RELEASE_S
    assert "a loss, says the test" in str(released[0][1])
    assert not pending.is_done()
    with pytest.raises(CollectiveAborted):
        lonely.allreduce(torch.ones(1)).wait()  # and nothing starts any more
    finish_alone(kind, silent).wait()
    await_true(pending.is_done, "the abandoned operation to end")


def test_an_abandoned_operation_still_owns_its_buffer(world: World) -> None:
    """Why aborted buffers have to be replaced: the late peer's data arrives in them."""
    lonely, silent = world(2)
    tensor = torch.ones(4)
    pending = lonely.allreduce(tensor)
    lonely.abort("given up")
    with pytest.raises(CollectiveAborted):
        pending.wait()
    silent.allreduce(torch.ones(4)).wait()
    await_true(lambda: bool((tensor == 2).all()), "the late write")


def test_an_abort_that_came_first_is_seen(world: World) -> None:
    lonely, silent = world(2)
    pending = lonely.allreduce(torch.ones(4))
    lonely.abort_flag.set("before anyone waited")
    with pytest.raises(CollectiveAborted, match="before anyone waited"):
        pending.wait()
    silent.allreduce(torch.ones(4)).wait()
    await_true(pending.is_done, "the abandoned operation to end")


def test_a_finished_operation_does_not_fail_by_a_later_abort(world: World) -> None:
    members = world(2)

    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.ones(4)
        pending = c.allreduce(tensor)
        await_true(pending.is_done, "the reduction")
        c.abort("afterwards")
        pending.wait()
        return tensor

    assert all(torch.equal(t, torch.full((4,), 2.0)) for t in run_ranks(members, act))


def test_what_the_caller_gets_wrong_is_said_at_once(world: World) -> None:
    (only,) = world(1)
    with pytest.raises(ValueError, match="global_rank 4"):
        only.send(torch.ones(1), destination=4, tag=0)
    with pytest.raises(ValueError, match="allgather"):
        only.allgather(torch.ones(3), torch.ones(2))


def test_failures_are_one_type() -> None:
    assert issubclass(CollectiveAborted, CollectiveFailed)
