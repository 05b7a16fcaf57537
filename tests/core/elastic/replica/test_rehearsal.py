"""A rehearsal leaves torch nothing to decide in a joiner's first step, and changes nothing of the script's."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua_core.elastic.replica.rehearsal import rehearse

decided = Counter()
method = "propagate_op_sharding_non_cached"
original = getattr(ShardingPropagator, method)

def counted(self, *arguments, **keywords):
    decided["n"] += 1
    return original(self, *arguments, **keywords)

setattr(ShardingPropagator, method, counted)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
decay, plain = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=torch.tensor(0.1))
calls = []
register_optimizer_step_pre_hook(lambda *_: calls.append("step"))
before = [p.to_local().clone() for p in net.parameters()]

def first_step():
    net(torch.ones(4, 3)).pow(2).mean().backward()
    decided.clear()
    optimizer.step()
    return decided["n"]

if "rehearse" in sys.argv:
    print("layouts", rehearse([optimizer, torch.optim.LBFGS(net.parameters())]))
    assert not optimizer.state and not calls and decided["n"] > 0
    assert all(p.grad is None and torch.equal(p.to_local(), b) for p, b in zip(net.parameters(), before))
print("decided", first_step() > 0)
assert calls == ["step"]
"""


def run(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_first_step_has_nothing_left_to_decide() -> None:
    assert run() == "decided True\n"
    assert run("rehearse") == "layouts 4\ndecided False\n"
