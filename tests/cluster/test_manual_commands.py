"""The commands that the manual prints for a cluster, typed in their order to daemons on lab hosts."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from bagua_agent.etcd import cluster_keys
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.observation.cluster_status import cluster_status
from tests.cluster.cluster import DEADLINE_S, Cluster
from tests.cluster.conftest import MakeCluster
from tests.cluster.test_cluster_commands import Terminal
from tests.docs.printed import printed_commands
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

NODES = 4
PAGE_LIMIT_S = 40.0

# The reader's script. The job `demo` trains until it is stopped, others for ten steps.
TRAIN = """
import os, sys, time
import torch
import bagua_core as bagua
net = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = bagua.DistributedDataParallel(net, [optimizer])
is_long = os.environ["BAGUA_JOB_ID"] == "demo"
samples = 4_000_000 if is_long else 40
loader = bagua.ElasticDataLoader(torch.utils.data.TensorDataset(torch.randn(samples, 2)), global_batch_size=4)
for step, (rows,) in loader.enumerate():
    optimizer.zero_grad()
    model(rows).mean().backward()
    optimizer.step()
    if step % 2 == 0:
        print("trains with", sys.argv[1:], flush=True)
    time.sleep(0.2 if is_long else 0.02)  # a step costs the processor some milliseconds
"""


@dataclass(frozen=True, slots=True)
class Command:
    """begin: of the printed words. says: a regular expression of what it prints. until: it stays; SIGINT ends it with
    this code when it has printed that. after: what must be true before it is typed; look: what must be true then."""

    begin: str
    says: str
    until: int | None = None
    after: Callable[[Cluster], object] | None = None
    look: Callable[[Cluster], object] | None = None


def type_all(terminal: Terminal, printed: Sequence[Sequence[str]], expected: Sequence[Command]) -> None:
    """Types every printed command; `export` sets a variable. There is one of `expected` for each of the others."""
    commands = iter(expected)
    for words in printed:
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            terminal.environment[name] = value
            continue
        command = next(commands)
        line = " ".join(words)
        assert line.startswith(f"bagua-launch {command.begin}"), f"{line}: {command.begin} is next"
        if command.after is not None:
            command.after(terminal.cluster)
        process = terminal.type(*words[1:])
        if command.until is not None:
            await_said(process, command.says, line)
        else:
            assert process.wait(DEADLINE_S) == 0, f"{line}\n{process.text()}\n{terminal.cluster.logs()}"
            assert re.search(command.says, process.text(), re.MULTILINE), f"{line}\n{process.text()}"
        if command.look is not None:
            command.look(terminal.cluster)
        if command.until is not None:
            process.send(signal.SIGINT)
            assert process.wait(DEADLINE_S) == command.until, f"{line}\n{process.text()}"
    assert not list(commands), "the page prints fewer commands"


def await_said(process: LabProcess, says: str, line: str) -> None:
    eventually(
        lambda: re.search(says, process.text()) or not process.is_running,
        DEADLINE_S,
        lambda: f"{line} prints {says}\n{process.text()}",
        0.05,
    )
    assert process.is_running, f"{line} ended\n{process.text()}"


@pytest.fixture
def terminal(make_cluster: MakeCluster) -> Terminal:
    """Of a reader without BAGUA_ETCD. The account and the variables of jobs are given by variables, not typed."""
    made = Terminal(make_cluster(NODES))
    del made.environment["BAGUA_ETCD"]
    made.environment |= {"BAGUA_USER": "root", "BAGUA_ENV": "PYTHONPATH,OMP_NUM_THREADS"}
    (made.directory / "train.py").write_text(TRAIN)
    return made


def has_ended(cluster: Cluster) -> None:
    """The job `demo`, all its agents too."""

    def ended() -> bool:
        over = cluster.store.get(cluster_keys.outcome("demo")) is not None
        return over and not cluster.store.get_prefix(JobKeys("demo").agents)[0]

    eventually(ended, DEADLINE_S, lambda: f"demo ends\n{cluster.logs()}", 0.05)


def runs(cluster: Cluster) -> None:
    """The job `demo`, not queued or starting any more."""

    def begun() -> bool:
        jobs = cluster_status(cluster.store, complain=print).jobs
        return ("demo", "running") in [(job.job_id, job.state) for job in jobs]

    eventually(begun, DEADLINE_S, lambda: f"demo runs\n{cluster.logs()}", 0.1)


def page_is_served(cluster: Cluster) -> None:
    def get() -> bytes:
        with urllib.request.urlopen("http://127.0.0.1:7465/", timeout=PAGE_LIMIT_S) as page:
            return bytes(page.read())

    assert b"cluster.js" in cluster.lab.hosts[0].inside(get)


FOLLOWED = Command("submit --follow", r"\Atrain-[0-9a-f]{6}\n(?s:.*)generation 1(?s:.*)^succeeded: ")


def test_the_commands_of_service_mode_run_as_they_are_printed(terminal: Terminal) -> None:
    pytest.importorskip("matplotlib", reason="events --plot needs matplotlib: pip install '.[plot]'")
    cluster = terminal.cluster
    endpoint = {"https://etcd-1:2379": cluster.etcd.endpoints}
    given = {**endpoint, "node-3": "h4"}
    type_all(
        terminal,
        printed_commands("docs/cluster.md", "bagua-launch scale demo 4:6", given),
        [
            Command("submit --nnodes 2:8", r"\Ademo\n\Z"),
            FOLLOWED,
            Command("status", r"^demo +running +2:8 ", after=runs),
            Command("nodes", r"^h2 +ready +[01]/1 (?s:.*)^h5 +ready "),
            Command("events demo", "generation 1"),
            Command("top demo", r"step [1-9]\d*", until=0),
            Command("dashboard", r"dashboard at http://127\.0\.0\.1:7465/", until=0, look=page_is_served),
            Command("events demo --plot", "demo.svg is written"),
            Command("trace demo", r"demo\.trace\.json: \d+ spans of \d+ workers?; "),
            Command("collectives demo", r"^rank 0, slot 0 of h[2-5]$"),
            Command("logs -f demo", r"\[h[2-5].*\] trains with \['--lr', '0.1'\]", until=130),
            Command("scale demo", "job 'demo': 4:6 nodes, was 2:8"),
            Command("drain h4", "node 'h4' gets no more jobs"),
            Command("undrain h4", "node 'h4' takes jobs again"),
            Command("stop demo", "stops at its next step boundary"),
            Command("delete demo", "job 'demo' is removed", after=has_ended),
        ],
    )
    assert "<svg" in (terminal.directory / "demo.svg").read_text()
    assert json.loads((terminal.directory / "demo.trace.json").read_text())["traceEvents"]


def test_the_first_commands_of_a_guide_run_as_they_are_printed(terminal: Terminal) -> None:
    endpoints = terminal.cluster.etcd.endpoints
    endpoint = {"https://etcd-1:2379": endpoints}
    in_two_lines = printed_commands("docs/cluster.md", "submit --follow --nnodes 2 train.py\n", endpoint)
    type_all(terminal, in_two_lines, [FOLLOWED])

    del terminal.environment["BAGUA_ETCD"]
    guide = printed_commands("docs/guide/systemd.md", "scale demo", {**endpoint, "node-3": "h4"})
    type_all(
        terminal,
        guide,
        [
            Command("submit --nnodes 2:8", r"\Ademo\n\Z"),
            Command("status", r"^demo +running +2:8 ", after=runs),
            Command("scale demo", "job 'demo': 4:8 nodes, was 2:8"),
            Command("drain h4", "node 'h4' gets no more jobs"),
        ],
    )

    del terminal.environment["BAGUA_ETCD"]
    given = {"10.0.0.1:2379": endpoints}
    looks = printed_commands("docs/guide/troubleshooting.md", "bagua-launch status", given)
    type_all(terminal, looks, [Command("status", r"^demo +running +4:8 "), Command("events", "generation 1")])
