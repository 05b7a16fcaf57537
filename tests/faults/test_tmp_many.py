"""Faults of all kinds in a random order. One node is left alone unless all three have the state."""

from __future__ import annotations

import random
import signal
import time

import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.etcd import EtcdCluster
from tests.lab.network import Host, Lab

ROUNDS = 12


class Chaos:
    """One fault a round, on any host but the first two: etcd's and that of the node left alone."""

    def __init__(self, one: Job, lab: Lab, etcd: EtcdCluster, seed: int) -> None:
        self.job = one
        self.etcd = etcd
        self.choose = random.Random(seed)
        self.keeper = one.start(lab.hosts[1], slots=2)
        self.keeper.await_line("is in force")
        self.nodes = {host: one.start(host) for host in lab.hosts[2:]}
        self.codes: dict[Node, int] = {}
        self.done: list[str] = []

    def round(self) -> None:
        host = self.choose.choice(list(self.nodes))
        faults = [self.kill_worker, self.kill_agent, self.power_off, self.cut, self.ask_to_leave]
        faults += [self.restart_etcd, self.kill_keepers_worker]
        fault = self.choose.choice(faults)
        self.done.append(f"{time.strftime('%H:%M:%S')} {fault.__name__} {host.name}")
        fault(host)
        # from "before it was noticed" to "after it was mended"
        wait_s = self.choose.choice([0.0, 0.3, 1.0, 4.0])
        time.sleep(wait_s)  # the fault's own timing, not synchronisation

    def kill_worker(self, host: Host) -> None:
        for worker in self.nodes[host].workers:
            worker.kill()

    def kill_keepers_worker(self, host: Host) -> None:
        self.job.await_world(4, after_step=self.job.step)
        self.choose.choice(self.keeper.workers).kill()

    def kill_agent(self, host: Host) -> None:
        self.nodes[host].kill_agent()
        self._replace(host, -signal.SIGKILL)

    def power_off(self, host: Host) -> None:
        host.power_off()
        host.heal()
        self._replace(host, -signal.SIGKILL)

    def cut(self, host: Host) -> None:
        host.cut()
        time.sleep(self.choose.choice([0.1, 0.6, 2.0, 5.0]))
        host.heal()

    def ask_to_leave(self, host: Host) -> None:
        node = self.nodes[host]
        node.send(signal.SIGTERM)
        code = node.process.wait(40)
        # 0: others go on; 143: its workers had to be ended, or nothing had begun there
        assert code in (0, 143), node.log
        self._replace(host, code)

    def restart_etcd(self, host: Host) -> None:
        self.etcd.kill()
        time.sleep(self.choose.choice([0.0, 1.0, 4.0]))
        self.etcd.restart()

    def _replace(self, host: Host, code: int) -> None:
        self.codes[self.nodes[host]] = code
        self.nodes[host] = self.job.start(host)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 16))
def test_faults_of_all_kinds(job: MakeJob, make_lab: MakeLab, seed: int) -> None:
    lab = make_lab(4)
    etcd = lab.etcd(lab.hosts[0])
    one = job(endpoints=etcd.endpoints, nodes="1:3", samples=12000, epochs=6, script=["--evaluate"])
    chaos = Chaos(one, lab, etcd, seed)
    one.await_world(4)
    for _ in range(ROUNDS):
        before = one.step
        chaos.round()
        one.await_step(before + 5)
    print("\n".join(chaos.done))
    one.await_world(4, after_step=one.step)
    one.finish([chaos.codes.get(node, 0) for node in one.nodes], deadline_s=120)
    one.check(finished=4)
