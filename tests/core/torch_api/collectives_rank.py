"""Every collective in the original's form, on each of three workers; writes <directory>/<rank> when all were right."""

import sys
from pathlib import Path

import numpy
import torch

import bagua_core.torch_api as bagua
from bagua_core.torch_api import torch_calls

assert not bagua.communication.is_initialized()
bagua.init_process_group(world_size=3, local_world_size=3)
rank, size = bagua.get_rank(), bagua.get_world_size()
assert (size, bagua.get_local_size()) == (3, 3) and bagua.get_local_rank() in range(3)
SUM_OF_RANKS = 3.0


def own(*shape, dtype=torch.float32):
    return torch.full(shape, rank, dtype=dtype)


def blank(*shape):
    return torch.full(shape, -1.0)


def same(tensor, expected):
    expected = torch.as_tensor(expected, dtype=tensor.dtype).reshape(tensor.shape)
    assert torch.equal(tensor, expected), (rank, tensor, expected)


def check(comm):
    received = blank(2, 2)
    bagua.allreduce(own(2, 2), received, comm=comm)
    same(received, [SUM_OF_RANKS] * 4)
    for op, expected in (
        (bagua.ReduceOp.AVG, 1),
        (bagua.ReduceOp.MAX, 2),
        (bagua.ReduceOp.MIN, 0),
        (bagua.ReduceOp.PRODUCT, 0),
    ):
        tensor = own(3)
        bagua.allreduce_inplace(tensor, op, comm)
        same(tensor, [expected] * 3)
    flags = torch.tensor([1 << rank])
    bagua.allreduce_inplace(flags, op=bagua.ReduceOp.BOR, comm=comm)
    same(flags, [7])
    for dtype in (torch.bfloat16, torch.float16, torch.uint8, torch.int32, torch.int64):
        tensor = own(2, dtype=dtype)
        bagua.allreduce_inplace(tensor, comm=comm)
        same(tensor, [3, 3])

    received = blank(2)
    bagua.reduce(own(2), received, dst=1, comm=comm)
    same(received, [SUM_OF_RANKS if rank == 1 else -1] * 2)
    tensor = own(2)
    bagua.reduce_inplace(tensor, 2, comm=comm)
    same(tensor, [SUM_OF_RANKS if rank == 2 else rank] * 2)

    received = blank(2)
    bagua.reduce_scatter(torch.arange(6.0) + rank, received, comm=comm)
    same(received, [6 * rank + 3, 6 * rank + 6])
    tensor = torch.arange(6.0) + rank
    bagua.reduce_scatter_inplace(tensor, comm=comm)
    same(tensor[:2], [6 * rank + 3, 6 * rank + 6])

    tensor = own(2)
    bagua.broadcast(tensor, src=2, comm=comm)
    same(tensor, [2, 2])
    got = bagua.broadcast_object({"rank": rank, "x": [1.5, "text"]}, 1, comm)
    assert got == {"rank": 1, "x": [1.5, "text"]}

    received = blank(3, 2)
    bagua.allgather(own(2), received, comm)
    same(received, [0, 0, 1, 1, 2, 2])
    tensor = own(6)
    bagua.allgather_inplace(tensor, comm)
    same(tensor, [0, 0, 1, 1, 2, 2])
    received = blank(6)
    bagua.gather(own(2), received, 0, comm)
    same(received, [0, 0, 1, 1, 2, 2] if rank == 0 else [-1] * 6)
    tensor = own(6)
    bagua.gather_inplace(tensor, 2, 1, comm)
    same(tensor, [0, 0, 1, 1, 2, 2] if rank == 1 else [rank] * 6)

    received = blank(2)
    bagua.scatter(torch.arange(6.0) if rank == 1 else torch.empty(0), received, 1, comm)
    same(received, [2 * rank, 2 * rank + 1])
    tensor = torch.arange(6.0) if rank == 1 else blank(2)
    bagua.scatter_inplace(tensor, 2, 1, comm)
    same(tensor[:2], [0, 1] if rank == 1 else [2 * rank, 2 * rank + 1])

    received = blank(3)
    bagua.alltoall(torch.arange(3.0) + 10 * rank, received, comm)
    same(received, [rank, 10 + rank, 20 + rank])
    tensor = torch.arange(3.0) + 10 * rank
    bagua.alltoall_inplace(tensor, comm)
    same(tensor, [rank, 10 + rank, 20 + rank])
    # rank r gets r + 1 elements from each rank; there is a gap behind each part
    received = blank(3 * (rank + 2))
    bagua.alltoall_v(
        torch.arange(9.0) + 10 * rank,
        [1, 2, 3],
        [0, 2, 5],
        received,
        [rank + 1] * 3,
        [p * (rank + 2) for p in range(3)],
        comm,
    )
    begin = [0, 2, 5][rank]
    for peer in range(3):
        part = received[peer * (rank + 2) :][: rank + 2]
        same(part[:-1], [10 * peer + begin + i for i in range(rank + 1)])
        same(part[-1:], [-1])
    tensor = torch.arange(3.0) + 10 * rank
    bagua.alltoall_v_inplace(tensor, [1, 1, 1], [0, 1, 2], comm)
    same(tensor, [rank, 10 + rank, 20 + rank])

    if rank == 0:
        bagua.send(torch.arange(4.0), 2, comm)
    if rank == 2:
        received = blank(4)
        bagua.recv(received, 0, comm)
        same(received, range(4))
    bagua.barrier(comm)


check(None)
check(bagua.new_group(None).get_global_communicator())
check(bagua.new_group([0, 1, 2], stream=None))

check(bagua.communication.comm.WORLD)
check(bagua.communication._get_default_group().get_global_communicator())

# a worker outside a group returns at once from what the members do
communication = bagua.communication
pair = bagua.new_group([2, 0])
comm = pair.get_global_communicator()
assert (comm is communication.CommMember.NON_COMM_MEMBER) == (rank == 1) == (pair.rank() == -1)
for given in (pair, comm, pair.group):
    tensor = own(1)
    bagua.allreduce_inplace(tensor, comm=given)
    same(tensor, [1 if rank == 1 else 2])
    assert bagua.broadcast_object([rank], 1, comm=given) == [1 if rank == 1 else 2]
    bagua.barrier(given)
received = blank(1)
if rank == 2:
    torch_calls.send(own(1), group=pair, group_dst=0)
else:
    assert torch_calls.recv(received, group=pair, group_src=1) == (2 if rank == 0 else -1)
assert communication.is_initialized()
assert communication.from_torch_group(pair) is pair
assert communication.from_torch_group(None).ranks == [0, 1, 2]
assert communication.get_communicator(pair.group_name, "global") is comm
assert (pair.ranks, pair.size()) == ([0, 2], 2)
if rank != 1:
    assert (comm.rank(), comm.nranks()) == (rank // 2, 2)
    received = blank(2, 1)
    comm.allgather(own(1), received)
    same(received, [0, 2])

# one node: its workers are all, and one of them speaks for it
intra = communication._get_default_group().get_intra_node_communicator()
assert (intra.rank(), intra.nranks()) == (rank, 3)
inter = communication._get_default_group().get_inter_node_communicator()
assert (inter is communication.CommMember.NON_COMM_MEMBER) == (rank != 0)

tensors = [own(2, 2), own(3, dtype=torch.int64), own(1)]
communication.allreduce_coalesced_inplace(tensors)
for tensor in tensors:
    same(tensor, [3] * tensor.numel())
tensors = [own(2, 2), own(3, dtype=torch.int64)]
communication.broadcast_coalesced(tensors, 1)
for tensor in tensors:
    same(tensor, [1] * tensor.numel())

# displacements may end with the end of the last part
received = blank(3)
counts, displacements = numpy.array([1, 1, 1]), numpy.array([0, 1, 2, 3])
bagua.alltoall_v(torch.arange(3.0) + 10 * rank, counts, displacements, received, counts, displacements)
same(received, [rank, 10 + rank, 20 + rank])
try:
    bagua.alltoall_v(own(3), [1, 1], [0, 1], received, counts, displacements)
except ValueError as error:
    assert "send_counts has 2 entries" in str(error)
else:
    raise AssertionError("nothing was said")

whole = bagua.new_group().get_global_communicator()
whole.barrier()
assert not whole.check_abort()
whole.abort()
try:
    bagua.allreduce_inplace(own(1), comm=whole)
except RuntimeError as error:
    assert whole.check_abort() and "abort() was called" in str(error)
else:
    raise AssertionError("nothing was said")
for received, words in ((blank(5), "6 elements arrived"),):
    try:
        bagua.allgather(own(2), received)
    except ValueError as error:
        assert words in str(error) and not (received + 1).any()
    else:
        raise AssertionError("nothing was said")
(Path(sys.argv[1]) / str(rank)).touch()
