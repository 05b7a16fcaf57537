"""Without a job the replica group is of one worker: what of torch's calls accept it, and what they refuse."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.wait import HANG_S

SCRIPT = """
import warnings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import distribute_tensor, Shard
import bagua_core as bagua

warnings.simplefilter("ignore", FutureWarning)  # names that every torch has are deprecated in some

group = bagua.replica_group()
assert group is bagua.replica_group() and isinstance(group, dist.ProcessGroup)
assert (group.rank(), group.size()) == (dist.get_rank(group), dist.get_world_size(group)) == (0, 1)
assert dist.get_backend(group) == group.name() == "bagua_replicas"
assert dist.get_process_group_ranks(group) == [0]
assert dist.distributed_c10d._get_all_pg_configs() and dist.distributed_c10d._world.pg_config_info  # a profiler's

own = torch.arange(4.0)
weight = torch.arange(4.0, requires_grad=True)
sharded = distribute_tensor(own, bagua.shard_mesh(), [Shard(0)])
for tensor in (own, weight, sharded):
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    dist.broadcast(tensor, group_src=0, group=group)
    assert torch.equal(tensor.detach().to_local() if tensor is sharded else tensor.detach(), torch.arange(4.0))
work = dist.all_reduce(own, group=group, async_op=True)
assert work.is_completed() and work.wait() and work.get_future().wait() == [own]
with dist._coalescing_manager(group=group):
    dist.all_reduce(own, group=group)
for shape in ((4,), (1, 4)):
    rows = torch.zeros(shape)
    dist._all_gather_base(rows, own, group=group)
    assert torch.equal(rows.view(4), own)
objects = [None]
dist.all_gather_object(objects, {"a": 1}, group=group)
assert objects == [{"a": 1}]
dist.barrier(group=group)

def functional_ones():
    return (
        functional.all_reduce(own, "sum", group),
        functional.broadcast(own, 0, group),
        functional.all_gather_tensor(own, 0, group),
        functional.reduce_scatter_tensor(own, "sum", 0, group),
        *functional.all_reduce_coalesced([own], "max", group),
        *functional.all_gather_into_tensor_coalesced([own], group),
        *functional.reduce_scatter_tensor_coalesced([own], "sum", [0], group),
    )

assert all(torch.equal(result + 0, own) for result in functional_ones())

def refused(kind, words, call):
    try:
        call()
    except kind as error:  # and not an error of torch's about this one
        assert words in str(error), error
    else:
        raise AssertionError(words)

refused(NotImplementedError, "has no reduce: it has all_reduce", lambda: dist.reduce(own, group_dst=0, group=group))
refused(NotImplementedError, "has no gather", lambda: dist.gather(own, [own], group_dst=0, group=group))
refused(NotImplementedError, "has no scatter", lambda: dist.scatter(own, [own], group_src=0, group=group))
refused(NotImplementedError, "has no all", lambda: dist.all_to_all([own], [own], group=group))
refused(NotImplementedError, "has no all", lambda: dist.all_to_all_single(own, own, group=group))
refused(NotImplementedError, "has no all", lambda: functional.all_to_all_single(own, None, None, group))
refused(NotImplementedError, "has no send", lambda: dist.send(own, group_dst=1, group=group))
refused(NotImplementedError, "has no recv", lambda: dist.recv(own, group_src=1, group=group))
boolean = torch.tensor([True])
refused(TypeError, "average of booleans", lambda: dist.all_reduce(boolean, dist.ReduceOp.AVG, group=group))
refused(TypeError, "average of booleans", lambda: functional.all_reduce(boolean, "avg", group))
premul = dist._make_nccl_premul_sum(2.0)
refused(ValueError, "use one of SUM, AVG", lambda: dist.all_reduce(own, premul, group=group))

dist.destroy_process_group(group)
assert bagua.replica_group() is group and all(torch.equal(result + 0, own) for result in functional_ones())
dist.destroy_process_group()
print("as torch's own")
"""


def test_torch_accepts_the_group_of_a_world_of_one() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S)
    assert ran.stdout.endswith("as torch's own\n"), ran.stderr
