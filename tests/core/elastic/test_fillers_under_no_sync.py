"""A worker without a share computes filler samples, which count nowhere: not in what no_sync() adds up either."""

from __future__ import annotations

from pathlib import Path

from tests.lab.launched import Launched, launch

SCRIPT = """
import contextlib, torch, bagua_core as bagua

bagua.init_process_group()
net = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(torch.ones({samples}, 1), global_batch_size={batch}, seed=0, {arguments})
for epoch in loader.epochs({epochs}):
    for draw, x in enumerate(loader, epoch * {draws}):
        has_share = loader.has_share
        synced = draw in {synced}
        with contextlib.nullcontext() if synced else model.no_sync():
            model(x).mean().backward()
        if synced:
            print(f"rank {{bagua.get_rank()}} draw {{draw}} gradient {{net.weight.grad.item():.3f}}", flush=True)
        if draw in {updates}:
            optimizer.step()
            optimizer.zero_grad()
"""
LOST = "bagua: warning: what this worker gathered under no_sync() is left out"


def trained(directory: Path, **values: object) -> Launched:
    defaults = {"arguments": "", "epochs": 1}
    (directory / "train.py").write_text(SCRIPT.format(**defaults | values))
    ended = launch("--standalone", "--nproc-per-node", "2", "train.py", directory=directory)
    assert ended.returncode == 0, ended.said
    return ended


def test_a_fillers_gradient_is_not_added_to_the_next_reduction(tmp_path: Path) -> None:
    """Rank 1 has a filler in the third batch, of one sample."""
    said = trained(tmp_path, samples=9, batch=4, epochs=2, draws=3, synced=(1, 3, 5), updates=(1, 3, 5)).said
    for rank in (0, 1):
        assert f"rank {rank} draw 1 gradient 2.000" in said, said  # of two draws, each of mean 1
        assert f"rank {rank} draw 3 gradient 1.500" in said, said  # of rank 0 two draws, of rank 1 one


def test_a_last_micro_batch_that_is_a_filler_takes_nothing_else_back(tmp_path: Path) -> None:
    """Rank 1 has one sample of three, and so a filler in the second micro-batch of each step."""
    micro = "max_local_batch_size=1"
    said = trained(tmp_path, samples=6, batch=3, arguments=micro, draws=4, synced=(2, 3), updates=(3,)).said
    for rank in (0, 1):
        # a third of each: of rank 0 two gathered and two more, of rank 1 one gathered and one more
        assert f"rank {rank} draw 3 gradient 2.000" in said, said


def test_what_a_worker_without_a_share_of_the_synchronized_batch_loses_is_said(tmp_path: Path) -> None:
    said = trained(tmp_path, samples=5, batch=4, draws=2, synced=(1,), updates=(1,)).said
    assert said.count(LOST) == 1 and "drop_last=True" in said


JOINS = """
import os, signal, time, torch, bagua_core as bagua
from pathlib import Path

bagua.init_process_group()
net = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
killed, begun = Path("killed"), 0
has_joined = killed.exists()
while bagua.next_step() < 10_000:
    begun += 1
    with model.no_sync():
        model(torch.ones(1, 1)).mean().backward()
    model(torch.ones(1, 1)).mean().backward()
    if bagua.get_local_rank() == 1 and begun == 3 and not has_joined:
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    done = torch.tensor([float(has_joined and begun > 1)])
    if bagua.allreduce(done, bagua.ReduceOp.MAX).item():
        break
    time.sleep(0.01)
"""


def test_a_joiner_in_its_first_step_is_not_warned(tmp_path: Path) -> None:
    """None of its gradients counts in that step, synchronized or not, and no option of a loader changes that."""
    (tmp_path / "train.py").write_text(JOINS)
    ended = launch("--standalone", "--nproc-per-node", "2", "train.py", directory=tmp_path)
    assert ended.returncode == 0 and "killed by SIGKILL" in ended.said, ended.said
    assert LOST not in ended.said and "drop_last" not in ended.said, ended.said
