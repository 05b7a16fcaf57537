"""The etcd that a node hosts for its job is killed: no step is missed, it is there again, and nodes can join."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Job, Node
from tests.lab.network import Lab
from tests.lab.wait import eventually

STEP_BOUND_S = 1.0


def etcds_of(node: Node) -> list[psutil.Process]:
    """Those that are one already, and not still the program that becomes one."""
    found = []
    for pid in node.family:
        try:
            process = psutil.Process(pid)
            if "etcd" in process.name() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue  # a worker that ended meanwhile
    return found


def kill_etcd(node: Node, *, damage: bool = False) -> psutil.Process:
    """Waits until another runs; that. damage: what it leaves is not readable."""
    [etcd] = etcds_of(node)
    etcd.suspend()
    if damage:
        overwrite(Path(etcd.cwd()) / "data")
    etcd.kill()
    return eventually(
        lambda: next((p for p in etcds_of(node) if p.pid != etcd.pid), None), 10.0, "another etcd", 0.02
    )


def overwrite(data: Path) -> None:
    files = [path for path in data.rglob("*") if path.is_file()]
    assert files
    for path in files:
        with path.open("r+b") as file:
            file.write(os.urandom(min(path.stat().st_size, 1 << 20)))


def hosting_and_guest(job: MakeJob, lab: Lab, nodes: str) -> tuple[Job, Node, Node]:
    one = job(nodes=nodes, samples=1200, script=["--step-s", "0.3"])
    hosting = one.start(lab.hosts[0], options=["--local-addr", lab.hosts[0].address])
    hosting.await_line("is in force")
    one.endpoints = f"{lab.hosts[0].address}:2379"
    guest = one.start(lab.hosts[1], options=["--rdzv-endpoint", one.endpoints])
    one.await_world(2)
    return one, hosting, guest


@pytest.mark.parametrize("damage", [False, True], ids=["killed", "killed and its data damaged"])
def test_the_etcd_that_a_node_hosts_is_killed(job: MakeJob, make_lab: MakeLab, damage: bool) -> None:
    lab = make_lab(3)
    one, hosting, guest = hosting_and_guest(job, lab, "1:3")
    killed_at = one.step
    kill_etcd(hosting, damage=damage)
    for node in (hosting, guest):
        node.await_line("etcd answers again")
    end = one.await_step(one.step + 10)
    gap_s = one.largest_gap_s(killed_at, end)
    one.measured("largest gap between steps, hosted etcd killed", gap_s, STEP_BOUND_S)
    late = one.start(lab.hosts[2], options=["--rdzv-endpoint", str(one.endpoints)])
    one.await_world(3, after_step=end)
    one.finish()
    one.check(finished=3)
    assert hosting.says("the etcd that this node hosts was killed by SIGKILL; starting it again")
    assert hosting.log.count("starting it again") == 1
    assert hosting.says("starting it on none") is damage
    assert any(node.says("putting them again") for node in (hosting, guest)) is damage
    for node in (hosting, guest, late):
        assert not node.says("did not happen"), "no step is missed"
        assert node.says("succeeded")


def test_the_private_etcd_of_a_job_of_one_node_is_killed(job: MakeJob) -> None:
    one = job(nodes="1")
    node = one.start(slots=2)
    one.await_world(2)
    kill_etcd(node)
    node.await_line("etcd answers again")
    one.await_step(one.step + 5)
    assert not node.says("did not happen"), "no step is missed"
    node.workers[1].kill()
    alone = one.await_world(1, after_step=one.last_world(2))
    one.await_world(2, after_step=alone)
    one.finish()
    one.check(finished=2)
    assert node.says("succeeded")


def test_the_etcd_that_was_started_again_does_not_outlive_its_agent(job: MakeJob) -> None:
    one = job(nodes="1")
    node = one.start()
    one.await_step(5)
    kill_etcd(node)
    node.await_line("etcd answers again")
    family = node.family
    node.send(signal.SIGKILL)
    assert node.process.wait(5) == -signal.SIGKILL
    eventually(lambda: not one.alive(family), 5.0, lambda: f"left: {one.alive(family)}")
