"""A rehearsal leaves torch nothing to decide in a joiner's first step, and changes nothing of the script's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagua_core.elastic.replica.rehearsal import NOT_REHEARSED, REHEARSED
from tests.lab.wait import HANG_S

SCRIPT = """
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bagua_core.elastic.replica import rehearsal
from bagua_core.elastic.replica.rehearsal import NOT_REHEARSED, REHEARSED, rehearse

decided = Counter()
method = "propagate_op_sharding_non_cached"
original = getattr(ShardingPropagator, method)

def counted(self, *arguments, **keywords):
    decided["n"] += 1
    return original(self, *arguments, **keywords)

setattr(ShardingPropagator, method, counted)
rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
calls = []
register_optimizer_step_pre_hook(lambda *_: calls.append("step"))

def sharded(width, bias):
    linear = torch.nn.Linear
    net = torch.nn.Sequential(linear(width, width + 4, bias=bias), torch.nn.Tanh(), linear(width + 4, 3, bias=bias))
    fully_shard(net, mesh=mesh)
    return net

names = sys.argv[3].split(",")
for width, name in enumerate(names, 3):  # each has layouts of its own
    kind, net = getattr(torch.optim, name), sharded(2 * width, bias=name != "Muon")
    if name == "AdamW":
        decay, plain = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
        optimizer = kind([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=torch.tensor(0.1))
    else:
        optimizer = kind(net.parameters(), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))
    before, states = [p.to_local().clone() for p in net.parameters()], len(optimizer.state)
    if rank == 0:  # alone: a rehearsal that communicated would wait for the other
        found = rehearse([optimizer])
        assert found == (len(before), ()), (name, found)
        assert len(optimizer.state) == states and not calls
        assert all(p.grad is None and torch.equal(p.to_local(), b) for p, b in zip(net.parameters(), before))
    net(torch.ones(4, 2 * width)).pow(2).mean().backward()
    decided.clear()
    optimizer.step()
    assert calls.pop() == "step"
    print(name, decided["n"] > 0)

net = sharded(90, bias=True)
if rank == 0:
    others = [getattr(torch.optim, name)(net.parameters()) for name in NOT_REHEARSED]
    assert rehearse(others) == (0, ())
    rehearsal.REHEARSED |= {"ASGD"}
    layouts, failed = rehearse([others[0]])
    assert layouts == 0 and len(failed) == 1 and failed[0].startswith("ASGD: "), failed
dist.barrier()
"""


QUICK = ("AdamW", "Muon")


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param(tuple(sorted(REHEARSED.difference(QUICK))), marks=pytest.mark.long)]
)
def test_the_first_step_has_nothing_left_to_decide(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Each optimizer that is rehearsed, on one of two workers: the other has to decide."""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path / "store"), ",".join(names)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [run.communicate(timeout=HANG_S) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    for rank, (out, _) in enumerate(said):
        assert out.split("\n")[:-1] == [f"{name} {rank == 1}" for name in names]


def test_every_optimizer_of_torch_is_rehearsed_or_has_a_reason_not_to_be() -> None:
    known = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    assert REHEARSED.isdisjoint(NOT_REHEARSED)
    assert known <= REHEARSED | NOT_REHEARSED.keys()
