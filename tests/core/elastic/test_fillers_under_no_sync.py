"""A worker without a share computes filler samples, which count nowhere: not in what no_sync() adds up either."""

from __future__ import annotations

from pathlib import Path

from tests.lab.launched import launch

# Of 9 samples in batches of 4, the third batch has one: rank 1 has a filler there, under no_sync().
SCRIPT = """
import contextlib, torch, bagua_core as bagua

bagua.init_process_group()
net = torch.nn.Linear(1, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
loader = bagua.ElasticDataLoader(torch.ones(9, 1), global_batch_size=4, seed=0)
draw = 0
for epoch in loader.epochs(2):
    for x in loader:
        has_share = loader.has_share
        with contextlib.nullcontext() if draw % 2 else model.no_sync():
            model(x).mean().backward()
        if draw % 2:
            print(f"rank {bagua.get_rank()} draw {draw} gradient {net.weight.grad.item()}", flush=True)
            optimizer.step()
            optimizer.zero_grad()
        elif not has_share:
            print(f"rank {bagua.get_rank()} draw {draw} has a filler", flush=True)
        draw += 1
"""


def test_a_fillers_gradient_is_not_added_to_the_next_reduction(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = launch("--standalone", "--nproc-per-node", "2", "train.py", directory=tmp_path)
    assert ended.returncode == 0, ended.said
    assert "rank 1 draw 2 has a filler" in ended.said
    for rank in (0, 1):
        assert f"rank {rank} draw 1 gradient 2.0" in ended.said  # of two draws, each of mean 1
        # of rank 0 two draws, of rank 1 one
        assert f"rank {rank} draw 3 gradient 1.5" in ended.said
