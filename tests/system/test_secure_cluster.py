"""Service mode as deploy/ describes it: three machines, etcd of three members, TLS everywhere, people on a fourth."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bagua_agent.etcd.server.embedded import find_etcd
from tests.docs.printed import printed
from tests.lab import machine
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import ROOT, Machine
from tests.lab.wait import HANG_S, eventually
from tests.system.site import COMMAND_POLL_S, DEADLINE_S, POLL_S, PROGRAM, SAMPLES, Site

__all__ = ["make_lab"]

SYSTEMD = ROOT / "deploy/systemd"
# A client of HTTP/2 without a certificate.
PROBE = """
import socket, ssl, sys
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
with context.wrap_socket(socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)) as secured:
    secured.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n")
    print(len(secured.recv(100)))
"""
FILES = ("ca.pem", "certificate.pem", "key.pem")


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run("authority", folder)

    def run(self, command: str, *words: object) -> None:
        line = [str(PROGRAM), "certs", command, *map(str, words)]
        subprocess.run(line, check=True, capture_output=True, timeout=HANG_S)

    def issue(self, name: str, role: str, *hosts: str) -> None:
        named = [word for host in hosts for word in ("--host", host)]
        self.run("issue", self.folder, name, "--role", role, *named)

    def hand_out(self, name: str, one: Machine, directory: str) -> None:
        for file in FILES:
            one.write(f"{directory}/{file}", (self.folder / name / file).read_text(), 0o600)

    def credentials(self, name: str, one: Machine) -> dict[str, str]:
        """On that machine, and as the variables that name them."""
        directory = f"/srv/{self.folder.name}-{name}"
        self.hand_out(name, one, directory)
        names = ("BAGUA_ETCD_CA", "BAGUA_ETCD_CERT", "BAGUA_ETCD_KEY")
        return {n: f"{directory}/{file}" for n, file in zip(names, FILES, strict=True)}


def start_etcd(machines: list[Machine], authority: Authority) -> str:
    """Our unit of a member on each; the endpoints."""
    members = ",".join(f"{m.name}=https://{m.address}:2380" for m in machines)
    for one in machines:
        one.run(["useradd", "--system", "--no-create-home", "etcd"])
        one.run(["install", "-m", "755", find_etcd(), "/usr/bin/etcd"])
        authority.issue(f"etcd-{one.name}", "etcd", one.name, one.address)
        authority.hand_out(f"etcd-{one.name}", one, "/etc/bagua/etcd-tls")
        one.write("/etc/bagua/etcd-tls/revoked.pem", (authority.folder / "revoked.pem").read_text())
        one.run(["chown", "-R", "etcd", "/etc/bagua/etcd-tls"])
        example = (SYSTEMD / "etcd.env").read_text().splitlines()
        own = {"NAME": one.name, "ADDRESS": one.address, "MEMBERS": members}
        assert {line.partition("=")[0] for line in example if line[:1] != "#"} == set(own)
        one.write("/etc/bagua/etcd.env", "".join(f"{k}={v}\n" for k, v in own.items()))
        unit = "/etc/systemd/system/bagua-etcd.service"
        one.write(unit, (SYSTEMD / "bagua-etcd.service").read_text())
        assert one.run(["systemd-analyze", "verify", unit]).stderr == ""
        one.run(["systemctl", "daemon-reload"])
        one.run(["systemctl", "enable", "--quiet", "bagua-etcd"])
        one.run(["systemctl", "start", "--no-block", "bagua-etcd"])
    for one in machines:
        eventually(
            lambda m=one: m.run(["systemctl", "is-active", "bagua-etcd"], check=False).stdout == "active\n",  # type: ignore[misc]
            DEADLINE_S,
            lambda m=one: f"etcd on {m.name}\n{m.journal('bagua-etcd')[-3000:]}",  # type: ignore[misc]
            POLL_S,
        )
    return ",".join(f"https://{m.address}:2379" for m in machines)


class SecureSite(Site):
    def __init__(self, machines: list[Machine], terminal: Machine, etcd: str, authority: Authority) -> None:
        super().__init__(machines, terminal, etcd, authority.credentials("ann", terminal))
        self.authority = authority

    def nodes(self) -> dict[str, list[str]]:
        """Jobs by node."""
        told = json.loads(self.told("nodes", "--json"))
        return {n["node_name"]: [job for job, _, state in n["jobs"] if state == "running"] for n in told}

    def of(self, job_id: str) -> list[Machine]:
        """The machines that run it."""
        nodes = self.nodes()
        return [m for m in self.machines if job_id in nodes.get(m.name, ())]


@pytest.fixture
def site(make_lab: MakeLab, tmp_path: Path) -> Iterator[SecureSite]:
    if reason := machine.unavailable():
        pytest.skip(reason)
    lab = make_lab(4)
    authority = Authority(tmp_path / "bagua-ca")
    for name, role in (("root", "operator"), ("ann", "operator"), ("vic", "viewer")):
        authority.issue(name, role)
    with ExitStack() as stack:
        machines = []
        for host in lab.hosts:
            one = Machine(host)
            stack.callback(one.close)
            one.boot()
            machines.append(one)
        *nodes, terminal = machines
        for one in nodes:
            authority.issue(one.name, "agent", one.name, one.address)
        etcd = start_etcd(nodes, authority)
        made = SecureSite(nodes, terminal, etcd, authority)
        terminal.write("/srv/train.py", "# on the nodes\n")
        # where the authority's folder is: on the terminal's network, not on its disk
        endpoints = etcd.replace("https://", "")
        line = [PROGRAM, "certs", "etcd-users", authority.folder, "--endpoints", endpoints]
        users = terminal.host.run(line, output=tmp_path / "etcd-users")
        assert users.wait(60) == 0, users.text()
        assert users.text().splitlines()[-1] == "authentication enabled"
        for one in nodes:
            authority.hand_out(one.name, one, "/etc/bagua/tls")
            one.write("/etc/bagua/tls/revoked.pem", (authority.folder / "revoked.pem").read_text())
            given = {"/opt/bagua/bin/bagua-agent": str(PROGRAM), "https://etcd-1:2379": etcd}
            made.install(one, printed("docs/guide/systemd.md", "bagua-agent install", given))
        yield made


@pytest.mark.long
def test_a_day_of_a_cluster(site: SecureSite, tmp_path: Path) -> None:
    steps = tmp_path / "demo"
    site.submit("demo", "2", SAMPLES)
    step = site.await_world("demo", 2, steps)

    # scaled while it runs
    site.told("scale", "demo", "3")
    step = site.await_world("demo", 3, steps, step)
    site.told("scale", "demo", "2")
    step = site.await_world("demo", 2, steps, step)
    eventually(
        lambda: len(site.of("demo")) == 2, DEADLINE_S, lambda: f"two nodes\n{site.nodes()}", COMMAND_POLL_S
    )

    # a daemon is started again under it, without an effect on the job
    one = site.of("demo")[0]
    generation = site.steps("demo", steps).lines[-1].generation
    one.run(["systemctl", "restart", "bagua-agent"])
    eventually(
        lambda: "runs here already" in one.journal("bagua-agent"),
        DEADLINE_S,
        lambda: site.logs("demo"),
        POLL_S,
    )
    step = site.await_world("demo", 2, steps, step + 3)
    assert site.steps("demo", steps).lines[-1].generation == generation

    # its agent is killed, with all that it had started
    one.run(["systemctl", "kill", "--signal=SIGKILL", "bagua-job-demo"])
    step = site.await_world("demo", 2, steps, max(x.step for x in site.steps("demo", steps).lines))
    assert site.steps("demo", steps).lines[-1].generation != generation, "the kill was one"

    # one member of etcd is stopped: training does not miss it, nor do people
    stopped = site.machines[0]
    stopped.run(["systemctl", "stop", "bagua-etcd"])
    step = site.await_world("demo", 2, steps, step + 3)
    assert site.status("demo")["state"] == "running"
    stopped.run(["systemctl", "start", "bagua-etcd"])

    # a node is drained: the third takes its place first
    drained = site.of("demo")[0]
    site.told("drain", drained.name, "--reason", "new disk")

    def is_replaced() -> bool:
        there = site.of("demo")
        return len(there) == 2 and drained not in there

    eventually(
        is_replaced,
        DEADLINE_S,
        lambda: f"{drained.name} is left\n{site.nodes()}\n{site.logs('demo')}",
        COMMAND_POLL_S,
    )
    step = site.await_world("demo", 2, steps, max(x.step for x in site.steps("demo", steps).lines))

    # a machine is rebooted in order, drained or not: here one that the job runs on
    site.told("undrain", drained.name)
    rebooted = site.of("demo")[0]
    rebooted.reboot()
    site.await_world("demo", 2, steps, max(x.step for x in site.steps("demo", steps).lines))

    # a second job waits, and the first makes room for it
    site.told("scale", "demo", "2:3")
    step = site.await_world("demo", 3, steps, max(x.step for x in site.steps("demo", steps).lines))
    site.submit("second", "1", 80)
    site.await_world("second", 1, tmp_path / "second")
    step = site.await_world("demo", 2, steps, step)
    site.await_end("second")
    assert site.steps("second", tmp_path / "second").check(80, 1) == []
    site.await_world("demo", 3, steps, step)

    site.hurry()
    site.await_end("demo")
    assert site.steps("demo", steps).check(SAMPLES, 1) == []
    site.await_empty()


def test_strangers_get_nowhere(site: SecureSite, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger-ca")
    stranger.issue("ann", "operator")
    theirs = stranger.credentials("ann", site.terminal)
    ours = site.credentials
    vic = site.authority.credentials("vic", site.terminal)
    knows_us = {"BAGUA_ETCD_CA": ours["BAGUA_ETCD_CA"]}
    for credentials, code in (
        ({}, 2),  # nothing at all: it is not even tried
        (knows_us, 1),  # knows the authority, shows nothing
        (theirs, 1),  # of another authority
        ({**theirs, **knows_us}, 1),
    ):
        said = site.told("status", credentials=credentials, code=code)
        assert said.count("\n") == 1 and "etcd" in said, said
    # a viewer looks, and changes nothing
    assert [n["node_name"] for n in json.loads(site.told("nodes", "--json", credentials=vic))] == sorted(
        m.name for m in site.machines
    )
    said = site.told("drain", site.machines[0].name, credentials=vic, code=2)
    assert "denies it to the holder of certificate" in said and "vic" in said, said
    assert "drained" not in site.told("nodes")
    # the daemon's own service asks for certificates too
    node = json.loads(site.told("nodes", "--json"))[0]
    host, _, port = node["address"].rpartition(":")
    done = site.terminal.run([sys.executable, "-c", PROBE, host, port], check=False)
    told = done.stdout + done.stderr
    assert done.stdout == "0\n" or "certificate required" in told.lower(), f"an answer: {told}"
