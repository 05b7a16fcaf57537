"""The daemon as a systemd service on booted machines: it is ready, it is killed under a job, a machine reboots."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagua_core.elastic import ledger
from tests.lab import machine
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import eventually

__all__ = ["make_lab"]

SERVICE = ROOT / "deploy" / "systemd" / "bagua-agent.service"
DEADLINE_S = 90.0

CONFIG = """
insecure = true
[etcd]
endpoints = ["{etcd}"]
[node]
slots = 1
[jobs]
default_user = "trainer"
environment = ["PYTHONPATH", "OMP_NUM_THREADS"]
[times]
node_lease_s = 2.0
"""

# Where the tests' interpreter and sources lie, instead of an installation.
DROP_IN = """
[Service]
ExecStart=
ExecStart={python} -m bagua_agent.service serve --config /etc/bagua/agent.toml
Environment=PYTHONPATH={path}
PrivateTmp=no
"""

TRAIN = """
import os, sys, time
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
    if not os.path.exists("/tmp/hurry"):
        time.sleep(0.05)
"""
PYTHONPATH = f"{ROOT}:{ROOT / 'protos'}"


class Site:
    """Machines with the service on them; the first lab host has etcd, and people's terminals."""

    def __init__(self, machines: list[Machine], etcd: str) -> None:
        self.machines = machines
        self.etcd = etcd

    def install(self, one: Machine) -> None:
        one.run(["useradd", "--create-home", "trainer"])
        one.write("/etc/bagua/agent.toml", CONFIG.format(etcd=self.etcd))
        one.write("/etc/systemd/system/bagua-agent.service", SERVICE.read_text())
        dropped = DROP_IN.format(python=sys.executable, path=PYTHONPATH)
        one.write("/etc/systemd/system/bagua-agent.service.d/lab.conf", dropped)
        one.write("/srv/train.py", TRAIN)
        one.run(["systemctl", "daemon-reload"])
        one.run(["systemctl", "enable", "--now", "bagua-agent"])  # returns once it is ready

    def told(self, *words: str) -> str:
        env = {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "BAGUA_ETCD": self.etcd}
        line = ["sh", "-c", 'cd /srv && exec "$@"', "sh", sys.executable, "-m", "bagua_launch", *words]
        return self.machines[0].run(line, env=env).stdout

    def status(self, job_id: str) -> dict[str, object]:
        (found,) = json.loads(self.told("status", job_id, "--json"))
        return dict(found)

    def logs(self) -> str:
        units = ("bagua-agent", "bagua-job-demo")
        return "\n".join(f"---- {m.name} {u}\n{m.journal(u)}" for m in self.machines for u in units)

    def steps(self, directory: Path) -> ledger.Ledger:
        """What the job's workers wrote, gathered from all machines."""
        for one in (m for m in self.machines if m.is_up):
            listed = one.run(["sh", "-c", "ls /home/trainer/ledger 2>/dev/null || true"]).stdout.split()
            for name in listed:
                (directory / f"{one.name}-{name}").write_text(one.read(f"/home/trainer/ledger/{name}"))
        return ledger.read(directory)


@pytest.fixture
def site(make_lab: MakeLab) -> Iterator[Site]:
    if reason := machine.unavailable():
        pytest.skip(reason)
    lab = make_lab(3)
    etcd = lab.etcd(lab.hosts[0]).endpoints
    with ExitStack() as stack:
        machines = []
        for host in lab.hosts[1:]:
            one = Machine(host)
            stack.callback(one.close)
            one.boot()
            machines.append(one)
        made = Site(machines, etcd)
        for one in machines:
            made.install(one)
        yield made


def test_a_job_outlives_daemons_and_a_reboot(site: Site, tmp_path: Path) -> None:
    first, second = site.machines
    assert first.run(["systemd-analyze", "verify", "/etc/systemd/system/bagua-agent.service"]).stderr == ""
    shown = first.run(["systemctl", "show", "bagua-agent", "-p", "ActiveState,StatusText"]).stdout
    assert "ActiveState=active" in shown and "StatusText=0 jobs in 0 of 1 slots" in shown
    words = (
        "--nnodes",
        "1:2",
        "--name",
        "demo",
        "--ledger",
        "/home/trainer/ledger",
        "--env",
        "PYTHONPATH,OMP_NUM_THREADS",
    )
    site.told("submit", *words, "train.py", "8000")

    def by(size: int, after_step: int = 0) -> int:
        lines = site.steps(tmp_path).lines
        return next((x.step for x in lines if x.step > after_step and x.world_size == size), 0)

    both = eventually(lambda: by(2), DEADLINE_S, lambda: f"a step by 2\n{site.logs()}")
    # its processes are its account's, in a control group of its own
    for one in site.machines:
        pids = ",".join(map(str, one.processes("bagua.slice/bagua-job-demo.service")))
        owners = one.run(["ps", "-o", "user=", "-p", pids]).stdout.split()
        assert owners.count("trainer") >= 2, owners  # the worker, and what it was forked from
        assert set(owners) == {"root", "trainer"}, owners
    for one in site.machines:
        one.run(["systemctl", "kill", "--signal=SIGKILL", "bagua-agent"])
        eventually(
            lambda m=one: "runs here already" in m.journal("bagua-agent"),  # type: ignore[misc]
            DEADLINE_S,
            lambda: f"found again\n{site.logs()}",
        )
    both = eventually(lambda: by(2, both + 5), DEADLINE_S, lambda: f"it goes on\n{site.logs()}")
    assert len({line.generation for line in site.steps(tmp_path).lines if line.world_size == 2}) == 1
    second.pull_the_plug()
    alone = eventually(lambda: by(1, both), DEADLINE_S, lambda: f"a step by 1\n{site.logs()}")
    second.plug_in()
    eventually(lambda: by(2, alone), DEADLINE_S, lambda: f"a step by 2 again\n{site.logs()}")
    for one in site.machines:
        one.run(["touch", "/tmp/hurry"])
    eventually(lambda: site.status("demo")["state"] == "ended", DEADLINE_S, lambda: f"it ends\n{site.logs()}")
    assert site.status("demo")["exit_code"] == 0
    found = site.steps(tmp_path)
    assert found.check(8000, 1) == []
    for one in site.machines:
        eventually(
            lambda m=one: m.processes("bagua.slice") == [], 20, f"nothing in bagua.slice of {one.name}"
        )  # type: ignore[misc]
