"""What pages print of lost, joining and leaving nodes is what real jobs on lab hosts print."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.fault_victims import leading_host, pick
from tests.docs.printed import printed, printed_lines, printed_text
from tests.docs.terminals import Since, Terminals, shows
from tests.docs.test_pages_on_hosts import JOINS
from tests.faults.conftest import MakeJob, MakeLab, job, make_lab
from tests.faults.job import DEADLINE_S, ROOT, SCRIPT, Node
from tests.faults.test_restart_mode import DDP, ONE_WORKER, await_epochs, epochs
from tests.lab.network import Host, Lab
from tests.lab.wait import eventually

__all__ = ["job", "make_lab"]

SAMPLES = 24 * 3000  # more than the faults of one job take
SHARDED = SCRIPT.with_name("train_sharded.py")


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
    *options, script = printed("README.md", "examples/stock_ddp.py", {DDP: str(ROOT / DDP)})
    program = [script, "--epochs", "1000", "--pause", "0.05", "--checkpoint", str(tmp_path / "spiral.pt")]
    options += ONE_WORKER
    one = job(endpoints=lab.etcd(lab.hosts[0]).endpoints, program=program, options=options)
    first = one.start(lab.hosts[1])
    await_epochs(first, 1)  # so that rank 0, which prints the epochs, is there
    one.start(lab.hosts[2])

    def kill() -> Terminals:
        before = [processes for _, processes in epochs(first)]
        await_epochs(first, 2, count=before.count(2) + 2)  # the host's node takes part, again
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
