"""The same script without a job: `shard_mesh()` is a mesh of one worker, and training is as without shards."""

from __future__ import annotations

import subprocess
import sys

from tests.lab.wait import HANG_S

SCRIPT = """
import torch
from torch.distributed.fsdp import fully_shard
import bagua_core as bagua

def trained(shards):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    if shards:
        bagua.init_process_group()
        fully_shard(net[0], mesh=bagua.shard_mesh())
        fully_shard(net, mesh=bagua.shard_mesh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = bagua.DistributedDataParallel(net, [optimizer]) if shards else net
    for step in range(3):
        if shards:
            bagua.next_step()
        model(torch.ones(4, 3) * step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() if shards else p for p in net.parameters()]

for mine, expected in zip(trained(True), trained(False), strict=True):
    torch.testing.assert_close(mine, expected)
assert (bagua.replica_rank(), bagua.replica_count(), bagua.shard_rank(), bagua.replica_size()) == (0, 1, 0, 1)
assert bagua.get_world_size() == 1
print("as without shards")
"""


def test_a_script_trains_without_a_job() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_S)
    assert ran.stdout.endswith("as without shards\n"), ran.stderr


REPLACED = """
import torch
from torch.distributed.fsdp import fully_shard
import bagua_core as bagua
from bagua_core.model.sharded_modules import workers_averaged

bagua.init_process_group()
net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
fully_shard(net, mesh=bagua.shard_mesh())
net[0].weight = torch.nn.Parameter(net[0].weight.detach().clone())
names = {name: 1 for name, _ in net.named_parameters()}
assert workers_averaged(net) == names, workers_averaged(net)
net(torch.ones(1, 3)).sum().backward()  # torch's sharding takes the new parameter over
assert workers_averaged(net) == names, workers_averaged(net)
print("all are averaged")
"""


def test_a_parameter_that_was_set_after_fully_shard_is_averaged_too() -> None:
    ran = subprocess.run([sys.executable, "-c", REPLACED], capture_output=True, text=True, timeout=HANG_S)
    assert ran.stdout.endswith("all are averaged\n"), ran.stderr
