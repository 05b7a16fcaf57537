"""One terminal, several hosts over a real sshd: the job runs, Ctrl-C leaves in order, nothing outlives a terminal."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.printed import printed
from tests.faults.job import ROOT, SCRIPT
from tests.lab import ledger
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.network import Host, Lab
from tests.lab.process import LabProcess
from tests.lab.wait import eventually

__all__ = ["make_lab"]

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:" + os.environ.get("PATH", ""))
DEADLINE_S = 60.0
SAMPLES, EPOCHS = 1920, 2
STEP_S = 0.8  # until a test lets the job hurry
POLL_S = 0.1

pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None,
    reason="no OpenSSH here; install openssh-server and openssh-client",
)

CONFIG = """
ListenAddress {address}
Port 22
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/person_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
"""


class Terminal:
    """On the lab's first host; sshd runs on the others."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab = lab
        self.directory = directory
        self.records = directory / "ledger"
        self.out = directory / "out"
        self.out.mkdir()
        for name in ("host_key", "person_key"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True
            )
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd's other half is confined
        self.servers = [self._serve(host) for host in lab.hosts[1:]]
        self._count = 0

    def _serve(self, host: Host) -> LabProcess:
        config = self.directory / f"sshd-{host.name}"
        config.write_text(CONFIG.format(address=host.address, directory=self.directory))
        assert SSHD is not None
        server = host.run([SSHD, "-D", "-e", "-f", config], output=self.directory / f"sshd-{host.name}.log")

        def answers() -> bool:
            assert server.is_running, server.text()
            try:
                host.connect((host.address, 22), 1.0).close()
            except ConnectionRefusedError:
                return False
            return True

        eventually(answers, DEADLINE_S, lambda: f"sshd on {host.name}\n{server.text()}")
        return server

    def start(self, *words: str, hosts: str | None = None) -> LabProcess:
        self._count += 1
        names = hosts or ",".join(host.name for host in self.lab.hosts[1:])
        client = f"ssh -i {self.directory}/person_key -o BatchMode=yes -o StrictHostKeyChecking=no"
        client += " -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ConnectTimeout=5"
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", "OMP_NUM_THREADS": "1"}
        line = [
            sys.executable,
            "-m",
            "bagua_launch",
            "--hosts",
            names,
            "--ssh",
            client,
            "--env",
            "PYTHONPATH,OMP_NUM_THREADS",
        ]
        script = [str(SCRIPT), "--out", str(self.out), "--samples", str(SAMPLES), "--epochs", str(EPOCHS)]
        script += ["--step-s", str(STEP_S)]
        output = self.directory / f"terminal-{self._count}.log"
        return self.lab.hosts[0].run(
            [*line, "--ledger", str(self.records), *words, *script], env=env, output=output
        )

    def await_world(self, size: int, process: LabProcess, after_step: int = 0) -> int:
        def found() -> int:
            assert process.is_running, process.text()
            if not self.records.is_dir():
                return 0
            lines = ledger.read(self.records).lines
            return next((x.step for x in lines if x.step > after_step and x.world_size == size), 0)

        return eventually(found, DEADLINE_S, lambda: f"a step by {size}\n{process.text()}", POLL_S)

    def check_nothing_left(self) -> None:
        servers = {server.pid for server in self.servers}
        for host in self.lab.hosts:
            eventually(lambda h=host: set(h.pids()) <= servers, 20, lambda h=host: f"{h}: {h.pids()}")  # type: ignore[misc]


@pytest.fixture
def terminal(make_lab: MakeLab, tmp_path: Path) -> Iterator[Terminal]:
    yield Terminal(make_lab(3), tmp_path)


def test_a_job_on_two_hosts_from_one_terminal(terminal: Terminal) -> None:
    given = {"h1,h2:8": "h2,h3:1", "4": "2"}
    words = printed("docs/guide/ssh.md", "--hosts", given)
    assert words == printed("docs/cluster.md", "--hosts", given)
    _, hosts, *options, _ = words
    process = terminal.start(*options, hosts=hosts)
    terminal.await_world(3, process)
    key_bits = [p for p in Path("/proc").glob("[0-9]*/cmdline") if b"PRIVATE KEY" in _read(p)]
    assert key_bits == [], "no key in a command line"
    (terminal.out / "hurry").touch()
    assert process.wait(DEADLINE_S) == 0, process.text()
    assert ledger.read(terminal.records).check(SAMPLES, EPOCHS) == []
    assert "without TLS" not in process.text()
    terminal.check_nothing_left()


def test_ctrl_c_leaves_in_order_and_a_lost_terminal_too(terminal: Terminal) -> None:
    process = terminal.start()
    terminal.await_world(2, process)
    process.send(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 128 + signal.SIGINT, process.text()
    assert "leaving at the next step boundary" in process.text()
    terminal.check_nothing_left()
    shutil.rmtree(terminal.records)
    process = terminal.start()
    terminal.await_world(2, process)
    process.kill()
    terminal.check_nothing_left()


def test_a_host_that_is_lost_and_one_that_can_not_be_reached(terminal: Terminal) -> None:
    process = terminal.start("--nnodes", "1:2")
    both = terminal.await_world(2, process)
    terminal.lab.hosts[2].kill_all()
    terminal.await_world(1, process, after_step=both)
    (terminal.out / "hurry").touch()
    assert process.wait(DEADLINE_S) == 0, process.text()
    assert "h3: ssh failed, see above" in process.text()
    assert ledger.read(terminal.records).check(SAMPLES, EPOCHS) == []


def test_what_can_not_be_is_said_before_anything_starts(terminal: Terminal) -> None:
    for words, hosts, said in [
        ((), "h2,h2", "--hosts 'h2,h2': h2 is there twice"),
        ((), "h2:none", "'none' is no number of workers"),
        ((), "-oProxyCommand=x", "is no host"),
        (("--nnodes", "3"), "h2,h3", "2 hosts are given"),
    ]:
        process = terminal.start(*words, hosts=hosts)
        assert process.wait(DEADLINE_S) == 2
        assert said in process.text() and process.text().count("\n") == 1, process.text()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
