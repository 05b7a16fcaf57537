"""What every communicator does: one suite for all transports."""

from __future__ import annotations

import threading

import pytest
import torch

from bagua_core.communication.communicator import (
    Communicator,
    ReduceOp,
)
from tests.communicators.transports import ARITHMETIC, FLOATING, WHOLE, World, run_ranks, start_alone
from tests.core.communication.worlds import await_true
from tests.core.communication.worlds import run_ranks as in_threads


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
        for op in ARITHMETIC:
            tensor = torch.full((3, 2), c.global_rank + 1.0)
            c.allreduce(tensor, op).wait()
            results[op] = tensor
        return results

    for results in run_ranks(world(world_size), act):
        for op in ARITHMETIC:
            torch.testing.assert_close(results[op], expected[op].expand(3, 2))


def test_all_ranks_get_the_same_bits(world: World) -> None:
    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.randn(10_007, generator=torch.Generator(c.device).manual_seed(c.global_rank))
        c.allreduce(tensor).wait()
        return tensor

    first, *others = run_ranks(world(3), act)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATING, torch.complex64, torch.complex128])
def test_types_that_can_be_added(world: World, dtype: torch.dtype) -> None:
    """Alike by all three that reduce."""

    def act(c: Communicator) -> None:
        expected = torch.full((2, 5), 3).to(dtype)
        tensor = torch.full((2, 5), c.global_rank + 1).to(dtype)
        scattered = torch.zeros(5, dtype=dtype)
        c.reduce_scatter(scattered, tensor).wait()
        reduced = tensor.clone()
        c.reduce(reduced, destination=1).wait()
        c.allreduce(tensor).wait()
        assert as_bytes(tensor) == as_bytes(expected)
        assert as_bytes(scattered) == as_bytes(expected[0])
        assert c.global_rank != 1 or as_bytes(reduced) == as_bytes(expected)

    run_ranks(world(2), act)


def as_bytes(tensor: torch.Tensor) -> list[int]:
    """To compare types that torch itself cannot."""
    found: list[int] = tensor.reshape(-1).view(torch.uint8).tolist()
    return found


@pytest.mark.parametrize("dtype", [d for d in WHOLE if d is not torch.uint64])
def test_whole_numbers_have_all_operations(world: World, dtype: torch.dtype) -> None:
    operands = [[12, 3, 100, 0], [10, 3, 50, 1], [6, 3, 20, 1]]
    expected = {
        ReduceOp.SUM: [28, 9, 170, 2],
        ReduceOp.AVG: [9, 3, 56, 0],  # towards zero
        ReduceOp.MIN: [6, 3, 20, 0],
        ReduceOp.MAX: [12, 3, 100, 1],
        ReduceOp.PRODUCT: [720, 27, 100_000, 0],
        ReduceOp.BOR: [14, 3, 118, 1],
        ReduceOp.BAND: [0, 3, 0, 0],
        ReduceOp.BXOR: [0, 3, 66, 0],
    }
    if dtype is torch.int8:  # a sum of 170 has wrapped around before it is divided
        expected[ReduceOp.AVG] = [9, 3, -28, 0]

    def act(c: Communicator) -> None:
        for op in ReduceOp:
            tensor = torch.tensor(operands[c.global_rank]).to(dtype)
            c.allreduce(tensor, op).wait()
            assert torch.equal(tensor, torch.tensor(expected[op]).to(dtype)), op

    run_ranks(world(3), act)


def test_large_and_negative_numbers_keep_their_order(world: World) -> None:
    """As a narrower or signed type they would not."""
    values = {torch.int16: [-5, 30_000], torch.uint16: [65_000, 3], torch.uint32: [4_000_000_000, 3]}

    def act(c: Communicator) -> None:
        for dtype, pair in values.items():
            for op, expected in ((ReduceOp.MIN, min(pair)), (ReduceOp.MAX, max(pair))):
                tensor = torch.tensor([pair[c.global_rank]]).to(dtype)
                c.allreduce(tensor, op).wait()
                assert tensor.tolist() == [expected]

    run_ranks(world(2), act)


def test_booleans_are_reduced_as_booleans(world: World) -> None:
    operands = [[True, True, False], [True, False, False], [True, False, False]]
    any_of, all_of, odd = [True, True, False], [True, False, False], [True, True, False]
    expected = {
        ReduceOp.SUM: any_of,
        ReduceOp.MAX: any_of,
        ReduceOp.BOR: any_of,
        ReduceOp.PRODUCT: all_of,
        ReduceOp.MIN: all_of,
        ReduceOp.BAND: all_of,
        ReduceOp.BXOR: odd,
    }

    def act(c: Communicator) -> None:
        for op, result in expected.items():
            tensor = torch.tensor(operands[c.global_rank])
            c.allreduce(tensor, op).wait()
            assert as_bytes(tensor) == [int(b) for b in result], op  # no 3 among the bytes

    run_ranks(world(3), act)


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, ReduceOp.AVG),
        (torch.float32, ReduceOp.BOR),
        (torch.complex64, ReduceOp.MAX),
        (torch.uint64, ReduceOp.MIN),
    ],
)
def test_what_cannot_be_reduced_is_refused_before_any_peer_is_asked(
    world: World, dtype: torch.dtype, op: ReduceOp
) -> None:
    alone = world(2)[0]  # the other never comes
    name = str(dtype) if dtype is not torch.bool else "boolean"
    with torch.device(alone.device):
        with pytest.raises(TypeError, match=name):
            alone.allreduce(torch.ones(2, dtype=dtype), op)
        with pytest.raises(TypeError, match=name):
            alone.reduce(torch.ones(2, dtype=dtype), 0, op)
        with pytest.raises(TypeError, match=name):
            alone.reduce_scatter(torch.ones(1, dtype=dtype), torch.ones((2, 1), dtype=dtype), op)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_gather_and_scatter_have_one_root(world: World, world_size: int) -> None:
    def act(c: Communicator) -> None:
        for root in range(world_size):
            is_root = c.global_rank == root
            reduced = torch.full((7,), c.global_rank + 1.0)
            c.reduce(reduced, root).wait()
            if is_root:
                assert reduced.tolist() == [world_size * (world_size + 1) / 2] * 7
            gathered = torch.zeros(world_size, 2, 3, dtype=torch.int16) if is_root else None
            c.gather(gathered, torch.full((2, 3), c.global_rank, dtype=torch.int16), root).wait()
            if gathered is not None:
                assert gathered[:, 0, 0].tolist() == list(range(world_size))
            part = torch.zeros(5, dtype=torch.bfloat16)
            parts = torch.arange(world_size).to(torch.bfloat16).unsqueeze(1).expand(-1, 5).contiguous()
            c.scatter(part, parts if is_root else None, root).wait()
            assert part.tolist() == [float(c.global_rank)] * 5

    run_ranks(world(world_size), act)


def test_unequal_parts_are_exchanged(world: World) -> None:
    """rows[s][r]: how many rank s has for rank r; some have none for anybody, some get none."""
    tables = [[[1, 2, 3], [0, 0, 4], [5, 1, 0]], [[1, 1, 1], [0, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 3]

    def act(c: Communicator) -> None:
        for rows, dtype in ((rows, dtype) for rows in tables for dtype in (torch.uint8, torch.float32)):
            own = rows[c.global_rank]
            incoming = [rows[s][c.global_rank] for s in range(3)]
            labels = [10 * c.global_rank + r for r in range(3) for _ in range(own[r])]
            tensor = torch.tensor(labels, dtype=dtype).reshape(-1, 1).expand(-1, 2).contiguous()
            output = torch.zeros((sum(incoming), 2), dtype=dtype)
            c.alltoall_v(output, tensor, incoming, own).wait()
            expected = [10 * s + c.global_rank for s in range(3) for _ in range(incoming[s])]
            assert output[:, 0].tolist() == output[:, 1].tolist() == expected

    run_ranks(world(3), act)


def test_a_barrier_ends_when_the_last_has_come(world: World) -> None:
    early, late = world(2)
    pending = start_alone("barrier", early)
    stalls: list[float] = []
    waiter = threading.Thread(target=lambda: pending.wait(stalls.append, stall_after_s=0.01))
    waiter.start()
    await_true(lambda: len(stalls) >= 2, "the early one to wait")
    assert not pending.is_done()
    start_alone("barrier", late).wait()
    waiter.join(5.0)
    assert not waiter.is_alive() and pending.is_done()


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


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16, torch.int16, torch.bool])
def test_alltoall_sends_each_rank_its_part(world: World, world_size: int, dtype: torch.dtype) -> None:
    def act(c: Communicator) -> None:
        for shape in ((), (5,), (3, 2), (0,)):
            parts = [torch.full(shape, 10 * c.global_rank + r).to(dtype) for r in range(world_size)]
            output = torch.zeros((world_size, *shape), dtype=dtype)
            c.alltoall(output, torch.stack(parts)).wait()
            expected = [torch.full(shape, 10 * r + c.global_rank).to(dtype) for r in range(world_size)]
            assert torch.equal(output, torch.stack(expected))

    run_ranks(world(world_size), act)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("op", ARITHMETIC)
def test_reduce_scatter_leaves_each_rank_its_part_of_the_reduction(
    world: World, world_size: int, op: ReduceOp
) -> None:
    def act(c: Communicator) -> None:
        own = torch.arange(world_size * 6.0).view(world_size, 3, 2) + c.global_rank + 1
        before = own.clone()
        reduced = own.clone()
        c.allreduce(reduced, op).wait()
        output = torch.zeros(3, 2)
        pending = c.reduce_scatter(output, own, op)
        pending.wait()
        pending.wait()
        torch.testing.assert_close(output, reduced[c.global_rank])
        assert torch.equal(own, before)

    run_ranks(world(world_size), act)


def test_half_precision_is_added_in_float32_by_reduce_scatter(world: World) -> None:
    """256 + 1 is 256 in bfloat16, so adding one rank after the other in it would lose the ones."""

    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.full((3, 4), 256.0 if c.global_rank == 0 else 1.0, dtype=torch.bfloat16)
        output = torch.zeros(4, dtype=torch.bfloat16)
        c.reduce_scatter(output, tensor).wait()
        return output

    for output in run_ranks(world(3), act):
        assert torch.equal(output, torch.full((4,), 258.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("elements", [3, 100_000])  # the larger ones travel in slices where there are any
def test_a_swap_brings_what_both_neighbours_sent(world: World, elements: int) -> None:
    def act(c: Communicator) -> dict[int, list[torch.Tensor]]:
        outgoing = [torch.arange(elements) + 1000.0 * c.global_rank + i for i in range(2)]
        neighbours = ((c.global_rank - 1) % 4, (c.global_rank + 1) % 4)
        incoming = {peer: [torch.zeros(elements) for _ in outgoing] for peer in neighbours}
        for pending in c.swap(outgoing, incoming, 40):
            pending.wait()
        return incoming

    for rank, incoming in enumerate(run_ranks(world(4), act)):
        assert sorted(incoming) == sorted({(rank - 1) % 4, (rank + 1) % 4})
        for peer, arrived in incoming.items():
            for i, tensor in enumerate(arrived):
                assert torch.equal(tensor, torch.arange(elements) + 1000.0 * peer + i)


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
        in_threads(range(3), lambda _: pending.wait())
        return tensor

    assert all(torch.equal(t, torch.full((4,), 6.0)) for t in run_ranks(world(2), act))
