"""In the style of the original's collectives example: each one by torch.distributed and by bagua, and compared.

Writes <out>/<rank>: "same".
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import bagua_core.torch_api as bagua

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
args = parser.parse_args()

assert bagua.get_world_size() >= 2
bagua.init_process_group()
rank, size = bagua.get_rank(), bagua.get_world_size()
torch.manual_seed(rank)
comm = bagua.communication._get_default_group().get_global_communicator()
assert (comm.rank(), comm.nranks()) == (rank, size)

if rank == 0:
    send_tensor = torch.rand(4)
    dist.send(send_tensor, 1)
    bagua.send(send_tensor, 1, comm=comm)
elif rank == 1:
    by_torch, by_bagua = torch.zeros(4), torch.zeros(4)
    dist.recv(by_torch, 0)
    bagua.recv(by_bagua, 0, comm=comm)
    assert torch.equal(by_torch, by_bagua) and by_torch.any()

by_torch = torch.rand(4)
by_bagua = by_torch.clone()
dist.broadcast(by_torch, 0)
bagua.broadcast(by_bagua, 0, comm=comm)
assert torch.equal(by_torch, by_bagua)

by_torch = torch.rand(4)
in_place, received = by_torch.clone(), torch.zeros(4)
dist.all_reduce(by_torch)
bagua.allreduce(in_place, received, comm=comm)
bagua.allreduce_inplace(in_place, comm=comm)
assert torch.equal(by_torch, received) and torch.equal(in_place, received)

by_torch = torch.rand(4)
in_place, received = by_torch.clone(), torch.zeros(4)
dist.reduce(by_torch, 1)
bagua.reduce(in_place, received, dst=1, comm=comm)
bagua.reduce_inplace(in_place, dst=1, comm=comm)
assert torch.equal(by_torch, in_place)
assert rank != 1 or torch.equal(in_place, received)

send_tensor, received = torch.rand(4), torch.zeros(4 * size)
parts = [torch.zeros(4) for _ in range(size)]
dist.all_gather(parts, send_tensor)
bagua.allgather(send_tensor, received, comm=comm)
assert torch.equal(torch.cat(parts), received)

parts = [torch.rand(4) for _ in range(size)]
by_torch, by_bagua = torch.zeros(4), torch.zeros(4)
dist.reduce_scatter(by_torch, parts)
bagua.reduce_scatter(torch.cat(parts), by_bagua, comm=comm)
assert torch.equal(by_torch, by_bagua)

parts = [torch.rand(4) for _ in range(size)]
arrived, received = [torch.zeros(4) for _ in range(size)], torch.zeros(4 * size)
dist.all_to_all(arrived, parts)
bagua.alltoall(torch.cat(parts), received, comm=comm)
assert torch.equal(torch.cat(arrived), received)

send_tensor = torch.arange(5, dtype=torch.float32) + 10 * rank
splits = [2, 3] if rank == 0 else [3, 2]
arriving = [2, 3] if rank == 0 else [3, 2]
displacements = np.array([0, splits[0], 5])
by_torch, by_bagua = torch.zeros(5), torch.zeros(5)
dist.all_to_all_single(by_torch, send_tensor, arriving, splits)
bagua.alltoall_v(
    send_tensor,
    np.array(splits),
    displacements,
    by_bagua,
    np.array(arriving),
    np.array([0, arriving[0], 5]),
    comm=comm,
)
assert torch.equal(by_torch, by_bagua) and by_torch.any()
(args.out / str(rank)).write_text("same")
