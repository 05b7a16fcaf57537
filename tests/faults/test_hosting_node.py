"""The etcd that a node hosts for its job is killed: training goes on to its end."""

from __future__ import annotations

import os
import signal

import psutil

from tests.faults.conftest import MakeJob, MakeLab
from tests.faults.job import Node

STEP_BOUND_S = 1.0


def etcd_of(node: Node) -> psutil.Process:
    return next(p for pid in node.family if "etcd" in (p := psutil.Process(pid)).name())


def test_the_etcd_that_a_node_hosts_is_killed(job: MakeJob, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    one = job(nodes="1:2")
    hosting = one.start(lab.hosts[0], options=["--local-addr", lab.hosts[0].address])
    hosting.await_line("is in force")
    one.endpoints = f"{lab.hosts[0].address}:2379"
    guest = one.start(lab.hosts[1], options=["--rdzv-endpoint", one.endpoints])
    one.await_world(2)
    etcd = etcd_of(hosting)
    killed_at = one.step
    os.kill(etcd.pid, signal.SIGKILL)
    for node in (hosting, guest):
        node.await_line("etcd does not answer")
    end = one.await_step(killed_at + 80)
    gap_s = one.largest_gap_s(killed_at, end)
    one.measured("largest gap between steps, hosted etcd killed", gap_s, STEP_BOUND_S)
    for node in (hosting, guest):
        assert not node.says("did not happen"), "no step is missed"
    # It is not started again, so nobody can write how the job ended; both nodes know that theirs is done.
    one.finish()
    for node in (hosting, guest):
        assert node.says("all workers here are done; etcd is away")
    one.check(finished=2)
