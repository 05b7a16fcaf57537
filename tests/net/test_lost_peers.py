"""Bagua-Net when a host vanishes, an interface disappears, a process freezes or a communicator is aborted."""

from __future__ import annotations

import shutil
import signal
import time

import pytest

from bagua_core.net import build
from benchmarks.net_driver.pair import connect
from benchmarks.net_driver.process import CallFailedError, Driver
from tests.lab import namespaces
from tests.lab.fixtures import MakeLab
from tests.lab.network import Host
from tests.net.conftest import MakeDriver
from tests.net.exchange import begin, established, finish, move

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

TIMEOUT_S = 1.0
LIMIT_S = 40.0  # beyond TIMEOUT_S, the kernel's own steps of seconds, and a machine that is busy
BIG = 64 << 20  # more than the kernel takes
REMOTE_ERROR = "failed 6"


def a_driver(make_driver: MakeDriver, host: Host | None = None) -> Driver:
    env = {"BAGUA_NET_TIMEOUT_S": str(TIMEOUT_S), "BAGUA_NET_STREAMS": "1"}
    driver = make_driver("plugin", host=host, words=[build.library(), "12"], **env)
    begin(driver)
    return driver


def failures(requests: dict[str, Driver], limit_s: float = LIMIT_S) -> dict[str, str]:
    """What each request fails with; all are tested in turn."""
    pending, found = dict(requests), {}
    deadline_s = time.monotonic() + limit_s
    while pending:
        assert time.monotonic() < deadline_s, f"neither done nor failed in {limit_s:g} s: {sorted(pending)}"
        for name, driver in list(pending.items()):
            try:
                assert driver.ask(f"test {name}") == ["pending"], f"{name} is done"
            except CallFailedError as failure:
                found[name] = str(failure)
                del pending[name]
        time.sleep(0.02)  # NCCL tests all the time; here the limits of seconds are what passes
    return found


def stays_pending(driver: Driver, request: str, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        assert driver.ask(f"test {request}") == ["pending"]
        time.sleep(0.02)


def in_flight(sender: Driver, receiver: Driver, comm: str) -> None:
    """A message of which a part has arrived: requests s-COMM and r-COMM."""
    sender.ask(f"buffer from {BIG} 1")
    receiver.ask(f"buffer to-{comm} {BIG} -1")
    receiver.ask(f"irecv r-{comm} {comm} to-{comm} {BIG} 0")
    sender.ask(f"isend s-{comm} {comm} from {BIG} 0")
    deadline_s = time.monotonic() + LIMIT_S
    while receiver.ask(f"check to-{comm} 0 1") == ["same"]:  # all zeros still
        assert time.monotonic() < deadline_s
        receiver.ask(f"test r-{comm}")


def until_shown(host: Host, timer: str, driver: Driver, request: str) -> None:
    """Returns when a connection of `host` has this timer of the kernel; tests the request meanwhile."""
    deadline_s = time.monotonic() + LIMIT_S
    while timer not in established(host, "--options"):
        assert time.monotonic() < deadline_s, established(host, "--options")
        driver.ask(f"test {request}")


@pytest.mark.parametrize("loss", ["link", "interface"])
def test_vanished_host_fails_every_request(make_driver: MakeDriver, make_lab: MakeLab, loss: str) -> None:
    """With bytes in flight, at rest, and with a closed window."""
    lab = make_lab(2)
    sender, receiver = (a_driver(make_driver, host) for host in lab.hosts)
    for comm in ("flight", "rest", "window"):
        connect(receiver, sender, comm)
    move(sender, receiver, "rest", 100_000, 1)
    receiver.ask("buffer to 10 -1")
    receiver.ask("irecv r-rest rest to 10 0")
    in_flight(sender, receiver, "flight")
    receiver.ask("wait 0.2 r-flight")  # takes what has come: its window is open
    sender.ask(f"isend s-window window from {BIG} 0")
    until_shown(lab.hosts[0], "timer:(persist", sender, "s-window")  # probes of a closed window
    if loss == "link":
        lab.hosts[1].cut()
    else:
        namespaces.ip("-n", lab.hosts[1].namespace, "link", "del", "eth0")
    until_shown(lab.hosts[0], "timer:(on", sender, "s-flight")  # bytes without an acknowledgement
    found = failures({"s-flight": sender, "r-flight": receiver, "s-window": sender, "r-rest": receiver})
    assert all(REMOTE_ERROR in failure for failure in found.values()), found
    assert sender.ask("devices") and receiver.ask("devices"), "both processes go on"


def test_frozen_sender_fails_a_begun_message(make_driver: MakeDriver) -> None:
    sender, receiver = (a_driver(make_driver) for _ in range(2))
    connect(receiver, sender, "c")
    in_flight(sender, receiver, "c")
    sender.send_signal(signal.SIGSTOP)
    assert REMOTE_ERROR in failures({"r-c": receiver})["r-c"]
    sender.send_signal(signal.SIGCONT)
    assert REMOTE_ERROR in failures({"s-c": sender})["s-c"]


@pytest.mark.parametrize("frozen", ["sender", "receiver"])
def test_frozen_peer_between_messages_is_waited_for(make_driver: MakeDriver, frozen: str) -> None:
    sender, receiver = (a_driver(make_driver) for _ in range(2))
    connect(receiver, sender, "c")
    sender.ask(f"buffer from {BIG} 1")
    receiver.ask(f"buffer to {BIG} -1")
    if frozen == "sender":
        receiver.ask(f"irecv r c to {BIG} 0")
        sender.send_signal(signal.SIGSTOP)
        stays_pending(receiver, "r", 2 * TIMEOUT_S)
        sender.send_signal(signal.SIGCONT)
        sender.ask(f"isend s c from {BIG} 0")
    else:
        receiver.send_signal(signal.SIGSTOP)
        sender.ask(f"isend s c from {BIG} 0")
        stays_pending(sender, "s", 2 * TIMEOUT_S)
        receiver.send_signal(signal.SIGCONT)
        receiver.ask(f"irecv r c to {BIG} 0")
    assert finish({"s": sender, "r": receiver}) == {"s": [str(BIG)], "r": [str(BIG)]}
    assert receiver.ask(f"check to {BIG} 1") == ["same"]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_abort_does_not_wait_for_a_blocked_peer(make_driver: MakeDriver, side: str) -> None:
    sender, receiver = (a_driver(make_driver) for _ in range(2))
    before = {driver: driver.usage()["descriptors"] for driver in (sender, receiver)}
    connect(receiver, sender, "c")
    in_flight(sender, receiver, "c")
    closing, blocked, end, other_end, request = (
        (sender, receiver, "send", "receive", "r-c")
        if side == "sender"
        else (receiver, sender, "receive", "send", "s-c")
    )
    blocked.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    closing.ask(f"close-{end} c")
    assert time.monotonic() - began_s < TIMEOUT_S * 10, "a close waits for nothing"
    blocked.send_signal(signal.SIGCONT)
    assert REMOTE_ERROR in failures({request: blocked})[request]
    blocked.ask(f"close-{other_end} c")
    receiver.ask("close-listen c-listen")
    assert {driver: driver.usage()["descriptors"] for driver in (sender, receiver)} == before
