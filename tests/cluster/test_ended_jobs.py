"""What stays of a job that has ended: its logs can be read, and nothing of it is in the way of the next of its name."""

from __future__ import annotations

import json

from bagua_agent.store import cluster_keys
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_cluster_commands import DEADLINE_S, JOB, Terminal
from tests.lab.wait import eventually

ENDLESS = """
import os, sys, torch
import bagua_core as bagua
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(4_000_000, 2))
said = False
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    if not said and bagua.get_world_size() == int(sys.argv[1]):
        said = True
        print(sys.argv[2], "of", bagua.get_world_size(), flush=True)
        open(f"{sys.argv[2]}-{os.getpid()}", "w").close()
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
"""


def submit_endless(terminal: Terminal, name: str, nodes: int, word: str) -> None:
    """Returns when workers on all nodes have printed `word` in a common generation."""
    (terminal.directory / "endless.py").write_text(ENDLESS)
    terminal.said("submit", "--nnodes", str(nodes), "--name", name, *JOB, "endless.py", str(nodes), word)
    eventually(
        lambda: len(list(terminal.directory.glob(f"{word}-*"))) == nodes,
        DEADLINE_S,
        lambda: f"{nodes} workers print\n{terminal.cluster.logs()}",
    )


def stop(terminal: Terminal, name: str) -> None:
    terminal.said("stop", name)
    eventually(
        lambda: terminal.cluster.store.get(cluster_keys.outcome(name)), DEADLINE_S, terminal.cluster.logs
    )


def test_logs_of_a_stopped_job_are_read_on_all_nodes_that_ran_it(make_cluster: MakeCluster) -> None:
    """Also of nodes that had left by the last generation."""
    cluster = make_cluster(2)
    terminal = Terminal(cluster)
    submit_endless(terminal, "demo", 2, "trains")
    stop(terminal, "demo")
    lines = [
        json.loads(line) for line in terminal.said("logs", "demo", "--stream", "out", "--json").splitlines()
    ]
    assert sorted((line["node"], line["line"]) for line in lines) == [
        ("h2", "trains of 2"),
        ("h3", "trains of 2"),
    ]
    assert "shows workers that had left" in terminal.said("logs", "demo", "--rank", "0", code=2)
