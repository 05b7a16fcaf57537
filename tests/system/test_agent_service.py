"""The daemon as a systemd service on booted machines: it is ready, it is killed under a job, a machine reboots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagua_agent.service.config.agent_config import DEFAULT_PATH
from bagua_agent.service.service_unit import SLICE_TEXT, unit_text
from tests.docs.printed import printed
from tests.lab import machine
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import eventually
from tests.system.site import DEADLINE_S, POLL_S, PROGRAM, SAMPLES, Site

__all__ = ["make_lab"]

SERVICE = ROOT / "deploy" / "systemd" / "bagua-agent.service"


@pytest.fixture
def site(make_lab: MakeLab) -> Iterator[Site]:
    """Two machines, one of them also a terminal; etcd on a lab host."""
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
        made = Site(machines, machines[0], etcd)
        for one in machines:
            made.install(one, [str(PROGRAM), "install", "--etcd", etcd, "--insecure"])
        yield made


def test_a_job_outlives_daemons_and_a_reboot(site: Site, tmp_path: Path) -> None:
    first, second = site.machines
    assert first.run(["systemd-analyze", "verify", "/etc/systemd/system/bagua-agent.service"]).stderr == ""
    assert first.run(["systemd-analyze", "verify", "/etc/systemd/system/bagua.slice"]).stderr == ""
    shown = first.run(["systemctl", "show", "bagua-agent", "-p", "ActiveState,StatusText"]).stdout
    assert "ActiveState=active" in shown and "StatusText=0 jobs in 0 of 1 slots" in shown
    check_no_trouble(first)
    site.submit("demo", "1:2", SAMPLES)
    both = site.await_world("demo", 2, tmp_path)
    most = [
        int(first.run(["systemctl", "show", "-p", "TasksMax", "--value", unit]).stdout)
        for unit in ("bagua-job-demo.service", "bagua.slice")
    ]
    host = most[0] / 0.8
    assert most[1] == pytest.approx(0.9 * host, rel=0.01), "all jobs together leave the host a tenth"
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
            lambda: f"found again\n{site.logs('demo')}",
            POLL_S,
        )
    refused = first.run([PROGRAM, "uninstall"], check=False)
    assert refused.returncode == 2 and "jobs run here: demo; drain the node first" in refused.stderr
    both = site.await_world("demo", 2, tmp_path, both + 2)
    lines = site.steps("demo", tmp_path).lines
    assert len({line.generation for line in lines if line.world_size == 2}) == 1
    second.pull_the_plug()
    alone = site.await_world("demo", 1, tmp_path, both)
    second.plug_in()
    site.await_world("demo", 2, tmp_path, alone)
    site.hurry()
    site.await_end("demo")
    assert site.steps("demo", tmp_path).check(SAMPLES, 1) == []
    site.await_empty()
    assert (
        first.run([PROGRAM, "uninstall"]).stdout
        == "stopped and removed bagua-agent.service and bagua.slice\n"
    )
    assert first.run([PROGRAM, "uninstall"]).stdout == "nothing was there\n"


def test_a_job_leaves_in_order_before_its_node_is_switched_off(site: Site, tmp_path: Path) -> None:
    """The only node of a job without periodic checkpoints: the last checkpoint is written while it leaves."""
    first, second = site.machines
    site.told("drain", second.name)  # no other node takes the job, which would have no checkpoint there
    site.submit("alone", "1", SAMPLES, "--checkpoint-dir", "/home/trainer/checkpoints")
    done = site.await_world("alone", 1, tmp_path)
    assert first.processes("bagua.slice/bagua-job-alone.service") != []
    first.reboot()
    (resumed,) = eventually(
        lambda: site.steps("alone", tmp_path).resumptions[1:],  # the first is of its beginning
        DEADLINE_S,
        lambda: f"it goes on from a checkpoint\n{site.logs('alone')}",
        POLL_S,
    )
    assert resumed.resumed_at_step >= done
    assert site.steps("alone", tmp_path).voided == (), f"no step is repeated\n{site.logs('alone')}"
    site.hurry()
    site.await_end("alone")
    assert site.steps("alone", tmp_path).check(SAMPLES, 1) == []


def test_a_node_refuses_wrong_installations_and_reports_trouble(site: Site) -> None:
    """In one test, since machines take long to boot."""
    one = site.machines[0]
    check_refused_installations(one)
    check_a_fault_that_passes(one)
    check_trouble(one)


def check_no_trouble(one: Machine) -> None:
    program = {"/opt/bagua/bin/bagua-agent": str(PROGRAM)}
    checked = one.run(printed("docs/guide/systemd.md", "bagua-agent check", program), check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "ok      systemd: each job gets a control group of its own" in checked.stdout
    runs, slow = (
        "ok      account: 'trainer' can run workers",
        "note    account: as 'trainer', bagua_core was not imported",
    )
    assert runs in checked.stdout or slow in checked.stdout, (
        "a busy machine imports slowly, and check says so"
    )
    assert "ok      etcd: 3." in checked.stdout


def check_refused_installations(one: Machine) -> None:
    before = one.read("/etc/bagua/agent.toml")
    other = one.run([PROGRAM, "install", "--etcd", "elsewhere:2379"], check=False)
    assert other.returncode == 2 and "is there and says something else" in other.stderr
    assert one.read("/etc/bagua/agent.toml") == before
    # what it writes does not depend on the directory in which it was called
    relative = ["sh", "-c", 'cd /etc/bagua && "$1" install --config agent.toml', "sh", PROGRAM]
    assert one.run(relative).stdout == "all is there already\n"
    for words, said in [
        ((), "--etcd, or write it"),
        (("--etcd", "etcd-1:2379", "--slots", "1"), "is plain and beyond this host"),
        (("--etcd", "127.0.0.1:2379", "--slots", "many"), "node.slots 'many'"),
    ]:
        done = one.run([PROGRAM, "install", "--config", "/etc/bagua/other.toml", *words], check=False)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert one.run(["ls", "/etc/bagua"]).stdout == "agent.toml\n"


def check_a_fault_that_passes(one: Machine) -> None:
    """A daemon that failed to start more often than systemd allows by default is ready once the cause is gone."""
    before = one.read("/etc/bagua/agent.toml")
    one.write("/etc/bagua/agent.toml", "[")
    one.run(["systemctl", "restart", "--no-block", "bagua-agent"])
    failed = "Main process exited, code=exited, status=2"
    eventually(
        lambda: one.journal("bagua-agent").count(failed) >= 6,
        DEADLINE_S,
        lambda: f"six starts\n{one.journal('bagua-agent')}",
        POLL_S,
    )
    one.write("/etc/bagua/agent.toml", before)
    eventually(
        lambda: one.run(["systemctl", "is-active", "bagua-agent"], check=False).stdout == "active\n",
        DEADLINE_S,
        lambda: f"ready again\n{one.journal('bagua-agent')}",
        POLL_S,
    )


def check_trouble(one: Machine) -> None:
    one.run(["userdel", "trainer"])
    checked = one.run([PROGRAM, "check"], check=False)
    assert checked.returncode == 1
    assert "TROUBLE account: 'trainer' does not exist; useradd --create-home trainer" in checked.stdout


def test_what_is_deployed_is_what_install_writes() -> None:
    assert unit_text("/opt/bagua/bin/bagua-agent", DEFAULT_PATH) == SERVICE.read_text()
    assert SERVICE.with_name("bagua.slice").read_text() == SLICE_TEXT
