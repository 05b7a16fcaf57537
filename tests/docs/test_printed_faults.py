"""The terminal's lines that pages print of a fault are those of real jobs with that fault.

A job has several faults, one after the other. Which process notices a loss first depends on moments, and with it which
lines there are; so a fault is repeated, at most STRIKES times, until one terminal shows all lines of the page.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.fault_victims import leading_host, pick
from tests.docs.printed import printed_lines, printed_text
from tests.docs.printed_lines import GAP, missing, parts
from tests.docs.test_pages_on_hosts import JOINS
from tests.faults.conftest import MakeJob, MakeLab, job, make_lab
from tests.faults.job import DEADLINE_S, ROOT, SCRIPT, START_S, Node
from tests.faults.test_restart_mode import await_epochs, epochs
from tests.lab.launched import launch
from tests.lab.network import Host, Lab
from tests.lab.wait import eventually

__all__ = ["job", "make_lab"]

STRIKES = 8
SAMPLES = 24 * 3000  # more than the faults of one job take
SHARDED = SCRIPT.with_name("train_sharded.py")
Terminals = Sequence[Sequence[str]]  # for each part of a block, the terminals one of which shows it

# Does what a file in its directory asks for, with the rank in the file's name.
TRAIN = """
import sys, time
from pathlib import Path
import torch
import bagua_core as bagua

bagua.init_process_group()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
wrapped = bagua.DistributedDataParallel(model, [optimizer])
samples = torch.utils.data.TensorDataset(torch.randn(40000, 4))

def asked(what):
    file = Path(sys.argv[1]) / f"{what}-{bagua.get_rank()}"
    return file.exists() and not file.unlink()

for (x,) in bagua.ElasticDataLoader(samples, global_batch_size=4):
    optimizer.zero_grad()
    wrapped(x).mean().backward()
    optimizer.step()
    assert not asked("raise"), "a bug"
    if asked("hang"):
        time.sleep(600)
    if asked("disagree"):
        bagua.allreduce(torch.ones(1))
    time.sleep(0.1)
"""


def shows(block: str, strike: Callable[[], Terminals]) -> None:
    """Strike until the terminals show each line of `block`. Raises AssertionError with the lines that they lack."""
    lacks: list[str] = []
    for _ in range(STRIKES):
        found = strike()
        lacks = []
        for part, terminals in zip(parts(block), found, strict=True):
            lacks += min((missing(part, text) for text in terminals), key=len)
        if not lacks:
            return
    shown = "\n----\n".join(text for terminals in found for text in terminals)
    raise AssertionError(
        "the page prints what the job does not:\n" + "\n".join(lacks) + f"\n---- of\n{shown}"
    )


class Since:
    """What some nodes print from now on."""

    def __init__(self, *nodes: Node) -> None:
        self._begins = {node: len(node.log) for node in nodes}

    def __call__(self) -> list[str]:
        return [node.log[begin:] for node, begin in self._begins.items()]

    def __contains__(self, node: Node) -> bool:
        return node in self._begins

    def await_all(self, words: str) -> None:
        eventually(
            lambda: all(words in text for text in self()), DEADLINE_S, lambda: f"{words}: {self()}", 0.02
        )


class Stage:
    """A job on three hosts that needs two."""

    def __init__(self, make: MakeJob, lab: Lab) -> None:
        self.cluster = lab.etcd(lab.hosts[0])
        self.job = make(endpoints=self.cluster.endpoints, nodes="2:3", samples=SAMPLES)
        self.hosts = lab.hosts[1:]
        self.nodes = {host: self.job.start(host) for host in self.hosts[:2]}
        self.job.await_world(2)

    @property
    def running(self) -> dict[Host, Node]:
        return {host: node for host, node in self.nodes.items() if node.process.is_running}

    def join(self) -> Terminals:
        """The missing host's node. The terminals of the others."""
        there = self.running
        (missing_host,) = (host for host in self.hosts if host not in there)
        others = Since(*there.values())
        self.nodes[missing_host] = self.job.start(missing_host)
        self.job.await_world(3)
        others.await_all("is in force")
        return [others()]

    def lose(self, act: Callable[[Host], None], *, of_leader: bool = False) -> tuple[Since, Since]:
        """Of three. What the others print, and what the victim's node prints."""
        if len(self.running) < 3:
            self.join()
        leader = eventually(
            lambda: leading_host(self.cluster, self.job.job_id, self.hosts), DEADLINE_S, "a leader", 0.05
        )
        victim = pick(self.hosts, leader, of_leader=of_leader)
        others = Since(*(node for host, node in self.nodes.items() if host is not victim))
        own = Since(self.nodes[victim])
        act(victim)
        self.job.await_world(2)
        others.await_all("is in force")
        return others, own

    def killed_agent(self, *, of_leader: bool) -> Terminals:
        others, _ = self.lose(lambda host: self.nodes[host].kill_agent(), of_leader=of_leader)
        return [others()]

    def killed_host(self, *, of_leader: bool) -> Terminals:
        others, _ = self.lose(Host.kill_all, of_leader=of_leader)
        return [others()]

    def cut(self) -> Terminals:
        cut: list[Host] = []

        def act(host: Host) -> None:
            host.cut()
            cut.append(host)

        others, own = self.lose(act)
        cut[0].heal()
        self.job.await_world(3)
        own.await_all("is in force")
        return [others(), own()]

    def leave(self) -> Terminals:
        others, own = self.lose(lambda host: self.nodes[host].send(signal.SIGTERM))
        (left,) = (node for node in self.nodes.values() if node in own)
        assert left.process.wait(DEADLINE_S) == 0
        return [own(), others()]

    def too_few(self) -> Terminals:
        """Of two, one is lost; the third host's node comes."""
        if len(self.running) == 3:
            self.leave()
        victim, stays = self.running
        there = Since(self.nodes[stays])
        self.nodes[victim].kill_agent()
        there.await_all("waiting: 1 of 2 nodes")
        comes = next(host for host in self.hosts if host not in (victim, stays))
        self.nodes[comes] = self.job.start(comes)
        self.job.await_world(2)
        there.await_all("is in force")
        return [there()]

    def etcd_away(self) -> Terminals:
        nodes = Since(*self.running.values())
        self.cluster.kill()
        nodes.await_all("etcd does not answer")
        self.cluster.restart()
        nodes.await_all("etcd answers again")
        return [nodes()]


def test_faults_of_nodes(job: MakeJob, make_lab: MakeLab) -> None:
    stage = Stage(job, make_lab(4))
    agent, host = stage.killed_agent, stage.killed_host
    shows(printed_lines("docs/guide/what-happens.md", "a node joins"), stage.join)
    shows(printed_lines("docs/guide/what-happens.md", "an agent is killed"), lambda: agent(of_leader=False))
    shows(printed_lines("docs/guide/what-happens.md", "the leader is killed"), lambda: agent(of_leader=True))
    shows(printed_lines("README.md", "the host of the leader is killed"), lambda: host(of_leader=True))
    shows(printed_lines("docs/guide/what-happens.md", "a host is killed"), lambda: host(of_leader=False))
    shows(printed_lines("docs/guide/what-happens.md", "a link is cut"), stage.cut)
    shows(printed_lines("docs/guide/what-happens.md", "a node leaves"), stage.leave)
    shows(printed_lines("docs/guide/what-happens.md", "too few nodes"), stage.too_few)
    shows(printed_lines("docs/guide/what-happens.md", "etcd is away"), stage.etcd_away)


class OneNode:
    """A job of two workers of TRAIN on this machine, which goes on from its checkpoints."""

    def __init__(self, make: MakeJob, directory: Path) -> None:
        self.directory = directory
        script = directory / "train.py"
        script.write_text(TRAIN)
        options = [
            "--hang-timeout",
            "5",
            "--checkpoint-dir",
            str(directory / "saved"),
            "--checkpoint-every",
            "10",
        ]
        self.job = make(program=[str(script), str(directory)], options=options)
        self.start()

    def start(self) -> list[str]:
        self.node = self.job.start(slots=2)
        self.node.await_line("is in force")
        return [self.node.log]

    def ask(self, what: str, rank: int) -> None:
        (self.directory / f"{what}-{rank}").touch()

    def lose(self, act: Callable[[], None]) -> Terminals:
        """A worker, in whose slot another joins."""
        self.job.await_world(2)
        own = Since(self.node)
        act()
        self.job.await_world(1)
        self.job.await_world(2)
        own.await_all("adds ")
        return [own()]

    def lose_state(self) -> Terminals:
        """In one moment all workers are killed."""
        eventually((self.directory / "saved").exists, START_S, "a directory of checkpoints", 0.05)
        self.job.await_step(self.job.step + 12)
        own = Since(self.node)
        self.node.freeze_agent()  # it sees both ends at once
        for worker in self.node.workers:
            worker.kill()
        self.node.thaw_agent()
        own.await_all("is in force")
        return [own()]

    def stop(self) -> Terminals:
        own = Since(self.node)
        self.node.send(signal.SIGTERM)
        assert self.node.process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        return [own(), self.start()]

    def fail(self, what: str, rank: int) -> Terminals:
        """The job ends; what is struck next finds it started again."""
        if not self.node.process.is_running:
            self.start()
        own = Since(self.node)
        self.ask(what, rank)
        assert self.node.process.wait(DEADLINE_S) == 1
        return [own()]


def test_faults_of_workers_and_scripts(job: MakeJob, tmp_path: Path) -> None:
    one = OneNode(job, tmp_path)
    shows(
        printed_lines("docs/guide/what-happens.md", "a worker is killed"),
        lambda: one.lose(lambda: one.node.workers[1].kill()),
    )
    shows(
        printed_lines("docs/guide/what-happens.md", "a worker hangs"),
        lambda: one.lose(lambda: one.ask("hang", 1)),
    )
    shows(printed_lines("docs/guide/what-happens.md", "every state is lost"), one.lose_state)
    shows(printed_lines("docs/guide/what-happens.md", "the only node is stopped"), one.stop)
    shows(printed_lines("docs/guide/what-happens.md", "the script raises"), lambda: one.fail("raise", 1))
    ended = one.fail("disagree", 0)
    shows(printed_lines("docs/guide/what-happens.md", "ranks disagree"), lambda: ended)
    shows(printed_lines("docs/collectives.md", "ranks disagree"), lambda: ended)


def test_a_host_of_a_sharded_replica_is_killed(job: MakeJob, make_lab: MakeLab) -> None:
    """Two replicas of two workers, each worker on a host of its own."""
    lab = make_lab(4)
    options = ("--replica-size", "2")
    endpoints = lab.etcd(lab.hosts[0]).endpoints
    one = job(endpoints=endpoints, nodes="2:4", file=SHARDED, samples=SAMPLES, options=options)
    nodes = {host: one.start(host) for host in lab.hosts}

    def kill() -> Terminals:
        one.await_world(2)
        others = Since(*(nodes[host] for host in lab.hosts[:3]))
        lab.hosts[3].kill_all()
        one.await_world(1)
        nodes[lab.hosts[3]] = one.start(lab.hosts[3])
        others.await_all("2 replicas (4 workers)")
        return [others(), others()]

    lines = printed_lines("docs/guide/what-happens.md", "a host of a replica is killed")
    shows(lines, kill)


def test_a_script_for_torchrun_loses_a_host(job: MakeJob, make_lab: MakeLab, tmp_path: Path) -> None:
    lab = make_lab(3)
    program = [str(ROOT / "examples" / "stock_ddp.py"), "--epochs", "1000", "--pause", "0.05"]
    program += ["--checkpoint", str(tmp_path / "spiral.pt")]
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, nodes="1:2", program=program)
    first, _ = (one.start(host) for host in lab.hosts[1:])

    def kill() -> Terminals:
        await_epochs(first, 2)
        own, alone = Since(first), [processes for _, processes in epochs(first)].count(1)
        lab.hosts[2].kill_all()
        await_epochs(first, 1, count=alone + 1)
        found = own()
        one.start(lab.hosts[2])
        return [found]

    shows(printed_lines("docs/guide/what-happens.md", "a script for torchrun loses a host"), kill)


class FirstJob:
    """The job of docs/guide/first-job.md, started as on the page, with a second node by the command that it prints."""

    def __init__(self, make: MakeJob, script: Path) -> None:
        given = {"epochs(5)": "epochs(100)"}  # as the page says
        script.write_text(printed_text("docs/guide/first-job.md", "loader.epochs(5)", given))
        self.job = make(nodes="1:4", program=[str(script)])
        self.first = self.job.start()
        found = eventually(lambda: JOINS.search(self.first.log), DEADLINE_S, lambda: self.first.log)
        self.join_words = shlex.split(found[1])
        self.job.await_world(1)

    def join(self) -> Terminals:
        own = Since(self.first)
        self.second = self.job.launch(None, self.join_words)
        self.job.await_world(2)
        own.await_all("is in force")
        return [own()]

    def kill(self) -> Terminals:
        if not self.second.process.is_running:
            self.join()
        own = Since(self.first)
        self.second.kill_agent()
        self.job.await_world(1)
        own.await_all("is in force")
        return [own()]


def test_a_second_node_of_the_first_job(job: MakeJob, tmp_path: Path) -> None:
    one = FirstJob(job, tmp_path / "train.py")
    shows(printed_lines("docs/guide/first-job.md", "a node joins"), one.join)
    shows(printed_lines("docs/guide/first-job.md", "a node is killed"), one.kill)


@pytest.mark.long
def test_the_quickstart() -> None:
    """Its job of examples/char_lm.py; tests/packaging has the rest."""
    head, *lines = printed_lines("README.md", "the quickstart").splitlines()
    done = launch(*shlex.split(head.partition(".venv/bin/bagua-launch ")[2]), directory=ROOT)
    assert done.returncode == 0, done.said
    assert missing([line for line in lines if line != GAP], done.said) == [], done.said
