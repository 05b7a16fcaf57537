"""A job with asynchronous averaging ends while a round is under way: as if there were none."""

from __future__ import annotations

import json
from pathlib import Path

from tests.lab.launched import launch

LIMIT_S = 120

# Worker 1 begins no round, so worker 0's first one is under way until the end.
SCRIPT = """
import json, sys
from pathlib import Path
import torch
import bagua_core as bagua

bagua.init_process_group()
torch.manual_seed(0)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
algorithm = bagua.algorithms.AsyncModelAverage(sync_interval_ms=0)
model = bagua.DistributedDataParallel(net, optimizers=[optimizer], algorithm=algorithm)
slot = bagua.get_local_rank()
if slot == 1:
    model._exchange.pause()
samples = torch.utils.data.TensorDataset(torch.arange(320.0).view(80, 4) / 320)
loader = bagua.ElasticDataLoader(samples, global_batch_size=8)
for _ in loader.epochs(1):
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        under_way = not model._exchange.wait_for_round(0.0)
weights = [p.detach().flatten().tolist() for p in net.parameters()]
found = {"under_way": under_way, "generation": bagua.generation(), "weights": weights}
Path(sys.argv[1], str(slot)).write_text(json.dumps(found))
"""


def test_no_new_generation_and_no_failure_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / "out"
    out.mkdir()
    words = ["--standalone", "--nproc-per-node", "2", "--rdzv-conf", "node_window=60"]
    ended = launch(*words, str(script), str(out), limit_s=LIMIT_S)
    assert ended.returncode == 0, ended.said
    found = [json.loads((out / str(slot)).read_text()) for slot in range(2)]
    assert found[0]["under_way"] and not found[1]["under_way"], "no round was under way at the end"
    assert found[0]["weights"] == found[1]["weights"]
    assert [f["generation"] for f in found] == [2, 2], ended.said
    assert not any(
        words in ended.said for words in ("waits for another generation", "generation 3", "did not happen")
    ), ended.said
