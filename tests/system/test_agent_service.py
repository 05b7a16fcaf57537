"""The daemon as a systemd service on booted machines: it is ready, it is killed under a job, a machine reboots."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagua_agent.service.agent_config import DEFAULT_PATH
from bagua_agent.service.service_unit import unit_text
from bagua_core.elastic import ledger
from tests.lab import machine
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import eventually

__all__ = ["make_lab"]

SERVICE = ROOT / "deploy" / "systemd" / "bagua-agent.service"
DEADLINE_S = 90.0

PROGRAM = Path(sys.executable).with_name("bagua-agent")

# The tests' interpreter may lie under /tmp.
DROP_IN = "[Service]\nPrivateTmp=no\n"

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
        one.write("/etc/systemd/system/bagua-agent.service.d/lab.conf", DROP_IN)
        one.write("/srv/train.py", TRAIN)
        said = one.run(
            [PROGRAM, "install", "--etcd", self.etcd, "--slots", "1", "--user", "trainer", "--insecure"]
        )
        assert [line.split()[0] for line in said.stdout.splitlines()] == ["wrote", "made", "wrote", "started"]
        eventually(
            lambda: (
                one.run(["systemctl", "is-active", "bagua-agent"], check=False).stdout.strip() == "active"
            ),
            DEADLINE_S,
            lambda: f"{one}: ready\n{one.journal('bagua-agent')}",
            0.1,
        )
        assert one.run([PROGRAM, "install"]).stdout == "all is there already\n"

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
    refused = first.run([PROGRAM, "uninstall"], check=False)
    assert refused.returncode == 2 and "jobs run here: demo; drain the node first" in refused.stderr
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
    assert first.run([PROGRAM, "uninstall"]).stdout == "stopped and removed bagua-agent.service\n"
    assert first.run([PROGRAM, "uninstall"]).stdout == "nothing was there\n"


def test_a_node_in_trouble_says_so_and_what_to_do(site: Site) -> None:
    one = site.machines[0]
    checked = one.run([PROGRAM, "check"], check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "ok      systemd: each job gets a control group of its own" in checked.stdout
    assert (
        "ok      account: 'trainer' can run workers" in checked.stdout
        and "ok      etcd: 3." in checked.stdout
    )
    one.run(["userdel", "trainer"])
    checked = one.run([PROGRAM, "check"], check=False)
    assert checked.returncode == 1
    assert "TROUBLE account: 'trainer' does not exist; useradd --create-home trainer" in checked.stdout


def test_what_is_deployed_is_what_install_writes() -> None:
    assert unit_text("/opt/bagua/bin/bagua-agent", DEFAULT_PATH) == SERVICE.read_text()


def test_an_installation_that_cannot_be_changes_nothing(site: Site) -> None:
    one = site.machines[0]
    before = one.read("/etc/bagua/agent.toml")
    other = one.run([PROGRAM, "install", "--etcd", "elsewhere:2379"], check=False)
    assert other.returncode == 2 and "is there and says something else" in other.stderr
    assert one.read("/etc/bagua/agent.toml") == before
    for words, said in [
        ((), "--etcd, or write it"),
        (("--etcd", "etcd-1:2379", "--slots", "1"), "is plain and beyond this host"),
        (("--etcd", "127.0.0.1:2379", "--slots", "many"), "node.slots 'many'"),
    ]:
        done = one.run([PROGRAM, "install", "--config", "/etc/bagua/other.toml", *words], check=False)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert one.run(["ls", "/etc/bagua"]).stdout == "agent.toml\n"
