"""The cluster commands: submit, follow, status, nodes, events, drain, stop; and their refusals."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bagua_agent.etcd import cluster_keys
from tests.cluster.cluster import DEADLINE_S, Cluster
from tests.cluster.conftest import MakeCluster
from tests.faults.job import ROOT
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

TRAIN = """
import sys
import torch
import bagua_core as bagua
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(int(sys.argv[1]), 2))
for (rows,) in bagua.ElasticDataLoader(data, global_batch_size=4):
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
print("trained on", len(data), "samples as rank", bagua.get_rank())
print("said on stderr", file=sys.stderr)
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
"""
ENDLESS = """
import os, sys, time, torch
import bagua_core as bagua
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ddp = bagua.DistributedDataParallel(model, [optimizer])
data = torch.utils.data.TensorDataset(torch.randn(4_000_000, 2))
said = False
loader = bagua.ElasticDataLoader(data, global_batch_size=4)
for (rows,) in loader:
    if not said and loader.step > 0 and bagua.get_world_size() == int(sys.argv[1]):  # a job that trains
        said = True
        print(sys.argv[2], "of", bagua.get_world_size(), flush=True)
        open(f"{sys.argv[2]}-{os.getpid()}", "w").close()
    optimizer.zero_grad()
    ddp(rows).mean().backward()
    optimizer.step()
    time.sleep(0.1)  # a step costs the processor some milliseconds
"""


class Terminal:
    """Commands typed on the cluster's first host, in a directory that all hosts have."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.directory = cluster.directory / "shared"
        self.directory.mkdir()
        (self.directory / "train.py").write_text(TRAIN)
        (self.directory / "endless.py").write_text(ENDLESS)
        self.environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}",
            "OMP_NUM_THREADS": "1",
            "BAGUA_ETCD": cluster.etcd.endpoints,
        }
        self._count = 0

    def type(self, *words: str) -> LabProcess:
        self._count += 1
        output: Path = self.cluster.directory / f"terminal-{self._count}"
        return self.cluster.lab.hosts[0].run_agent(
            [sys.executable, "-m", "bagua_launch", *words], self.environment, output, self.directory
        )

    def said(self, *words: str, code: int = 0) -> str:
        process = self.type(*words)
        assert process.wait(DEADLINE_S) == code, f"{words}\n{process.text()}\n{self.cluster.logs()}"
        return process.text()

    def submit_endless(self, name: str, nodes: int, word: str) -> None:
        """Returns when workers on all nodes have printed `word` in a common generation."""
        self.said("submit", "--nnodes", str(nodes), "--name", name, *JOB, "endless.py", str(nodes), word)
        eventually(
            lambda: len(list(self.directory.glob(f"{word}-*"))) == nodes,
            DEADLINE_S,
            lambda: f"{nodes} workers print\n{self.cluster.logs()}",
        )


JOB = ("--env", "PYTHONPATH,OMP_NUM_THREADS", "--user", "root")


def test_a_job_is_submitted_followed_and_told_of(make_cluster: MakeCluster) -> None:
    terminal = Terminal(make_cluster(2))
    assert terminal.said("status").strip() == "no job in this etcd"
    told = terminal.said(
        "submit", "--nnodes", "1:2", "--name", "demo", "-f", *JOB, "train.py", "400"
    ).splitlines()
    assert told[0] == "demo" and told[-1].startswith("succeeded: ")
    assert any("h2" in line or "h3" in line for line in told[1:-1])
    table = terminal.said("status")
    assert table.split()[:6] == ["JOB", "STATE", "ASKED", "NODES", "PRIORITY", "WHY"]
    assert "demo  ended  1:2" in table
    (job,) = json.loads(terminal.said("status", "demo", "--json"))
    assert (job["state"], job["exit_code"], job["nodes"]) == ("ended", 0, [])
    nodes = json.loads(terminal.said("nodes", "--json"))
    assert [(n["node_name"], n["state"], n["taken"], n["slots"]) for n in nodes] == [
        ("h2", "ready", 0, 1),
        ("h3", "ready", 0, 1),
    ]
    assert "generation 1" in terminal.said("events", "demo")
    told_as_json = [json.loads(line) for line in terminal.said("events", "demo", "--json").splitlines()]
    assert any("generation 1" in event["text"] for event in told_as_json)
    *_, end = map(json.loads, terminal.said("events", "-f", "demo", "--json").splitlines())
    assert (end["outcome"], end["exit_code"]) == ("succeeded", 0)
    (line,) = terminal.said("logs", "demo", "--rank", "0", "--stream", "out", "--json").splitlines()
    assert json.loads(line).items() >= {"rank": 0, "line": "trained on 400 samples as rank 0"}.items()
    printed = terminal.said("logs", "demo").splitlines()
    ranks = [int(line.rpartition(" ")[2]) for line in printed if "trained on 400 samples as rank" in line]
    assert ranks == list(range(len(ranks))) and ranks, printed
    assert printed[0].startswith("[h") and sum("said on stderr" in line for line in printed) == len(ranks)
    assert (
        terminal.said("logs", "demo", "--rank", "0", "--stream", "out")
        == "trained on 400 samples as rank 0\n"
    )
    assert terminal.said("logs", "demo", "--rank", "0", "--stream", "out", "--last-bytes", "7") == "rank 0\n"
    assert "no rank 7 with output" in terminal.said("logs", "demo", "--rank", "7", code=2)
    terminal.said("submit", "--name", "told", *JOB, "train.py", "400")
    followed = terminal.said("logs", "-f", "told", "--stream", "out")
    assert "trained on 400 samples as rank 0" in followed and followed.count("\n") == 1
    assert "a job 'demo' has ended and is still kept" in terminal.said(
        "submit", "--name", "demo", *JOB, "train.py", "4", code=2
    )
    failed = terminal.said(
        "submit", "--max-restarts", "0", "-f", *JOB, "train.py", "40", "on purpose", code=1
    )
    assert failed.splitlines()[0].startswith("train-") and "on purpose" in failed


def test_a_job_that_must_wait_says_why_and_a_drained_node_gets_none(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    terminal = Terminal(cluster)
    told = json.loads(terminal.said("drain", "h2", "--reason", "new disk", "--json"))
    assert told == {
        "node": "h2",
        "done": "node 'h2' gets no more jobs; its jobs leave it as soon as they can do without it",
    }
    wide = ("submit", "--json", "--nnodes", "2", "--name", "wide", *JOB, "endless.py", "2", "trains")
    assert json.loads(terminal.said(*wide)) == {"job": "wide"}
    waits = json.loads(terminal.said("status", "wide", "--json"))[0]
    assert waits["state"] == "queued" and "2 nodes" in waits["reason"], waits
    assert "h2    drained  0/1" in terminal.said("nodes") and "new disk" in terminal.said("nodes")
    assert terminal.said("undrain", "h2").strip() == "node 'h2' takes jobs again"
    eventually(
        lambda: len(json.loads(terminal.said("status", "wide", "--json"))[0]["nodes"]) == 2,
        DEADLINE_S,
        lambda: f"wide runs\n{cluster.logs()}",
    )
    assert terminal.said("scale", "wide", "1:2").strip() == "job 'wide': 1:2 nodes, was 2:2"
    assert json.loads(terminal.said("status", "wide", "--json"))[0]["min_nodes"] == 1
    assert json.loads(terminal.said("scale", "wide", "1:2", "--json"))["now"] == [1, 2]
    assert "stops at its next step boundary" in json.loads(terminal.said("stop", "wide", "--json"))["done"]
    eventually(
        lambda: cluster.store.get(cluster_keys.outcome("wide")) is not None,
        DEADLINE_S,
        lambda: cluster.logs(),
    )
    assert json.loads(terminal.said("status", "wide", "--json"))[0]["reason"].startswith("stopped")
    cluster.await_idle()


def test_what_can_not_be_is_one_line_with_the_next_move(make_cluster: MakeCluster) -> None:
    terminal = Terminal(make_cluster(1))
    for words, said in [
        (("submit", "--name", "a/b", "train.py"), "--name: job id 'a/b' is not allowed"),
        (("submit", "--priority", "high", "train.py"), "--priority 'high': not a priority"),
        (("submit", "--env", "NO_SUCH_VARIABLE", "train.py"), "NO_SUCH_VARIABLE is not set here"),
        (("submit", "--label", "rack", "train.py"), "'rack' is no label"),
        (("submit", "train.pz"), "'train.py'"),
        (("status", "nothing"), "no job 'nothing' in this etcd, nor any other"),
        (("stop", "nothing"), "no job 'nothing' in this etcd"),
        (("drain", "h9"), "no node 'h9'; there are h2"),
        (("undrain", "h2"), "node 'h2' is not drained"),
    ]:
        line = terminal.said(*words, code=2)
        assert said in line and line.count("\n") == 1, (words, line)
    # This node refuses what its configuration does not allow; the job waits and says so.
    terminal.said("submit", "--name", "as-other", "--user", "nobody", "train.py", "4")
    eventually(
        lambda: "jobs don't run as 'nobody' on h2" in terminal.said("status", "as-other"),
        DEADLINE_S,
        lambda: terminal.said("status", "as-other"),
    )
