"""torch.distributed's calls are answered after bagua.init_process_group(), and are torch's own again afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from bagua_core.elastic.script_collectives import default_group
from bagua_core.torch_api import torch_default_group
from bagua_core.torch_api.torch_default_group import REPLACED, give_back, take_over
from tests.core.torch_api.test_original_collectives import run
from tests.lab.launched import launch
from tests.lab.wait import HANG_S

OWN = {name: getattr(dist, name) for name in REPLACED}


@pytest.fixture
def replaced() -> Iterator[None]:
    take_over()
    yield
    give_back()


def test_importing_replaces_nothing() -> None:
    code = """
import torch.distributed as dist
own = dict(vars(dist))
import bagua_core.torch_api as bagua
assert {name for name, value in vars(dist).items() if own.get(name, value) is not value} == set()
bagua.init_process_group()
assert dist.is_initialized() and dist.barrier is not own["barrier"]
dist.destroy_process_group()
assert not dist.is_initialized() and dist.barrier is own["barrier"]
"""
    ended = run("-c", code)
    assert ended.returncode == 0, ended.stderr


def test_twice_and_back_is_as_before() -> None:
    take_over()
    take_over()
    assert all(getattr(dist, name) is REPLACED[name] for name in REPLACED)
    assert not default_group.is_made(), "the runtime asks torch's own functions"
    imported_by_name = dist.is_initialized
    assert imported_by_name()
    give_back()
    give_back()
    assert not imported_by_name()
    assert {name: getattr(dist, name) for name in REPLACED} == OWN


def test_a_world_of_one(replaced: None) -> None:
    assert dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == (0, 1)
    tensor = torch.arange(3.0)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    assert work is not None and work.wait() and work.is_completed()
    assert torch.equal(tensor, torch.arange(3.0))
    assert len(list(DistributedSampler(list(range(10))))) == 10  # type: ignore[arg-type]
    dist.init_process_group("gloo", rank=0, world_size=1)
    with pytest.raises(ValueError, match="world_size=4, but in this job it is 1"):
        dist.init_process_group("gloo", world_size=4)


def test_what_is_not_offered_says_what_to_use(replaced: None) -> None:
    with pytest.raises(NotImplementedError, match="use send and recv in matching order"):
        dist.isend(torch.ones(1), 0)
    with pytest.raises(ValueError, match=r"op=.*use one of SUM, AVG"):
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="no peer is named; pass dst or src"):
        dist.recv(torch.ones(1))


def test_a_forked_child_has_no_group(replaced: None) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(int(dist.is_initialized()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch_default_group.is_initialized()


SCRIPT = """
import sys
import torch, torch.distributed as dist
import bagua_core.torch_api as bagua
if "before" in sys.argv:
    dist.init_process_group("gloo")
    bagua.get_local_rank()
bagua.init_process_group()
if "after" in sys.argv:
    dist.init_process_group("gloo")
rank = bagua.get_rank()
assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
total = torch.full((2,), float(rank))
dist.all_reduce(total)
assert total.tolist() == [1.0, 1.0]
shard = list(torch.utils.data.distributed.DistributedSampler(list(range(10))))
assert len(shard) == 5

group = dist.new_group([1])
alone = torch.full((1,), 5.0)
dist.all_reduce(alone, group=group)
assert alone.item() == 5.0 and dist.get_rank(group) == (0 if rank == 1 else -1)
pair = dist.new_group([1, 0])
sent = torch.full((1,), float(rank))
dist.broadcast(sent, src=1, group=pair)
assert sent.item() == 1.0
assert rank or dist.recv(sent, src=1, group=group) == -1
gathered = [torch.zeros(1) for _ in range(2)] if rank == 0 else None
dist.gather(torch.full((1,), float(rank)), gathered, dst=0)
assert rank or [t.item() for t in gathered] == [0.0, 1.0]
part = torch.zeros(1)
dist.scatter(part, [torch.ones(1), torch.full((1,), 2.0)] if rank == 0 else None, src=0)
assert part.item() == rank + 1
words = [None, None]
dist.all_gather_object(words, {"rank": rank})
assert words == [{"rank": 0}, {"rank": 1}]
told = [rank, "x"]
dist.broadcast_object_list(told, src=1)
assert told == [1, "x"]

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model = model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.barrier()
print("rank", dist.get_rank(), "is done")
dist.destroy_process_group()
assert not dist.is_initialized()
"""


@pytest.mark.parametrize("torchs_group", ["none", "before", "after"])
def test_two_workers_with_and_without_a_group_of_torchs_own(torchs_group: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = launch("--standalone", "--nproc-per-node", "2", str(script), torchs_group)
    assert ended.returncode == 0, ended.said
    assert "rank 0 is done" in ended.said and "rank 1 is done" in ended.said


def test_another_launchers_processes_keep_torchs_functions() -> None:
    code = """
import torch.distributed as dist
import bagua_core.torch_api as bagua
own = dist.barrier
try:
    bagua.init_process_group()
except RuntimeError as error:
    assert "WORLD_SIZE=2" in str(error) and dist.barrier is own
    print("refused")
"""
    environment = {**os.environ, "WORLD_SIZE": "2", "RANK": "0"}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = f"{root}:{root / 'protos'}"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.stdout == "refused\n", ended.stderr
