"""A lab host boots a systemd of its own, keeps its disk, and leaves nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import machine, namespaces
from tests.lab.fixtures import MakeLab, make_lab
from tests.lab.machine import Machine
from tests.lab.network import Lab
from tests.lab.wait import eventually

__all__ = ["make_lab"]


@pytest.fixture
def lab(make_lab: MakeLab) -> Lab:
    if reason := machine.unavailable():
        pytest.skip(reason)
    return make_lab(2)


@pytest.fixture
def booted(lab: Lab) -> Iterator[Machine]:
    made = Machine(lab.hosts[0])
    try:
        made.boot()
        yield made
    finally:
        made.close()


def test_it_boots_with_a_name_a_network_and_a_disk_of_its_own(booted: Machine, lab: Lab) -> None:
    assert booted.run(["cat", "/proc/1/comm"]).stdout == "systemd\n"
    assert booted.run(["hostname"]).stdout == "h1\n" != os.uname().nodename
    assert booted.run(["systemctl", "--failed", "--no-legend"]).stdout == ""
    with lab.hosts[1].listen() as listening:
        port = listening.getsockname()[1]
        booted.run(["bash", "-c", f"echo from $(hostname) > /dev/tcp/h2/{port}"])
        peer, _ = listening.accept()
        with peer:
            assert peer.recv(100) == b"from h1\n"
    booted.write("/etc/bagua-lab-test", "kept\n", 0o600)
    assert not Path("/etc/bagua-lab-test").exists()
    booted.reboot()
    assert booted.read("/etc/bagua-lab-test") == "kept\n"
    booted.pull_the_plug()
    booted.plug_in()
    assert booted.read("/etc/bagua-lab-test") == "kept\n"


def test_it_boots_whatever_home_the_tests_were_given(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # lies under /tmp, of which a machine has its own
    made = Machine(lab.hosts[0])
    try:
        made.boot()
        assert made.run(["pwd"]).stdout == made.run(["sh", "-c", "echo ~root"]).stdout
        other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        assert made.run([*other, sys.executable, "-c", "print('runs')"]).stdout == "runs\n"
    finally:
        made.close()


def test_a_unit_ends_with_its_whole_control_group(booted: Machine) -> None:
    script = "setsid sleep 1000 & setsid sleep 1000 & exec sleep 1000"
    booted.run(["systemd-run", "--unit=three", "sh", "-c", script])
    # systemd-run returns when the shell runs, which may have forked nothing yet
    unit = "system.slice/three.service"
    eventually(lambda: len(booted.processes(unit)) == 3, 10.0, lambda: f"three of {booted.processes(unit)}")
    booted.run(["systemctl", "stop", "three"])
    assert booted.processes("system.slice/three.service") == []


def test_machines_share_no_control_group(booted: Machine, lab: Lab) -> None:
    other = Machine(lab.hosts[1])
    try:
        other.boot()
        for one in (booted, other):
            one.run(["systemd-run", "--unit=same", "sleep", "1000"])
        assert len(booted.processes("system.slice/same.service")) == 1
        other.run(["systemctl", "stop", "same"])
        assert len(booted.processes("system.slice/same.service")) == 1
    finally:
        other.close()


def test_closing_leaves_nothing(lab: Lab) -> None:
    made = Machine(lab.hosts[0])
    made.boot()
    assert len(namespaces.pids_in(lab.hosts[0].namespace)) > 2
    made.close()
    assert lab.hosts[0].pids() == []
    assert str(made._disk) not in Path("/proc/mounts").read_text()
