"""accelerate's gather_for_metrics of strings, in a job of two workers whose shares of an evaluation differ."""

from __future__ import annotations

from pathlib import Path

from tests.lab.launched import launch

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from bagua_core.integrations.huggingface import ElasticAccelerator

accelerator = ElasticAccelerator(cpu=True)
net = torch.nn.Linear(1, 1)
data = TensorDataset(torch.arange(7.0).reshape(7, 1))
model, optimizer, train, evaluation = accelerator.prepare(
    net, torch.optim.SGD(net.parameters(), lr=0.01), DataLoader(data, batch_size=4), DataLoader(data, batch_size=2)
)
for epoch in train.epochs(1):
    for (x,) in train:
        own = [f"{value:g}" for value in x.flatten().tolist()]
        in_step = accelerator.gather_for_metrics(own)
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
    said = []
    for (x,) in evaluation:
        said += accelerator.gather_for_metrics([f"number {value:g}" for value in x.flatten().tolist()])
assert said == [f"number {i}" for i in range(7)], said
assert sorted(in_step) != sorted(own) and len(in_step) == 3, (in_step, own)
print("rank", accelerator.process_index, "has all")
"""


def test_each_worker_gets_the_strings_of_all(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = launch("--standalone", "--nproc-per-node", "2", "train.py", directory=tmp_path)
    assert ended.returncode == 0, ended.said
    assert "rank 0 has all" in ended.said and "rank 1 has all" in ended.said
