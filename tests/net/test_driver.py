"""The driver of NCCL's network interface moves data through NCCL's own sockets, and reports what fails."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest

from benchmarks.net_driver import build
from benchmarks.net_driver.pair import Pair, Plan, connect
from benchmarks.net_driver.process import CallFailedError, Driver, DriverError
from tests.lab.fixtures import MakeLab
from tests.lab.wait import HANG_S
from tests.net.conftest import MakeDriver
from tests.net.exchange import connect_in_any_order, move

WAIT_S = 10
SETTINGS = [(0, 1), (1, 1), (2, 8)]  # NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD


def _pair(make_driver: MakeDriver, **env: str) -> tuple[Driver, Driver]:
    sender, receiver = make_driver(**env), make_driver(**env)
    assert sender.network == "Socket"
    for driver in (sender, receiver):
        driver.ask("init")
        assert driver.ask("devices") == ["1"]
    return sender, receiver


@pytest.mark.parametrize(("threads", "sockets"), SETTINGS)
def test_messages_of_any_size_arrive(make_driver: MakeDriver, threads: int, sockets: int) -> None:
    env = {"NCCL_SOCKET_NTHREADS": str(threads), "NCCL_NSOCKS_PERTHREAD": str(sockets)}
    sender, receiver = _pair(make_driver, **env)
    connect(receiver, sender, "c")
    for seed, size in enumerate([0, 1, 7, 4096, 65_537, 1_000_003]):
        move(sender, receiver, "c", size, seed, room=size + 5)


def test_communicators_connect_and_are_accepted_in_any_order(make_driver: MakeDriver) -> None:
    sender, receiver = _pair(make_driver)
    names, order = [f"c{number}" for number in range(12)], random.Random(19)
    connect_in_any_order(sender, receiver, names, order)
    for seed, name in enumerate(order.sample(names, len(names))):
        move(sender, receiver, name, 1000 + seed, seed)


def test_closed_communicators_leave_no_descriptor_and_no_thread(make_driver: MakeDriver) -> None:
    sender, receiver = _pair(make_driver, NCCL_SOCKET_NTHREADS="2", NCCL_NSOCKS_PERTHREAD="2")
    before = [driver.usage() for driver in (sender, receiver)]
    for number in range(3):
        connect(receiver, sender, f"c{number}")
        move(sender, receiver, f"c{number}", 300_000, number)
        assert sender.usage()["threads"] > before[0]["threads"]
        sender.ask(f"close-send c{number}")
        receiver.ask(f"close-receive c{number}")
        receiver.ask(f"close-listen c{number}-listen")
    for driver, usage in zip((sender, receiver), before, strict=True):
        now = driver.usage()
        assert (now["descriptors"], now["threads"]) == (usage["descriptors"], usage["threads"])


def test_killed_peer_fails_the_request(make_driver: MakeDriver) -> None:
    sender, receiver = _pair(make_driver)
    connect(receiver, sender, "c")
    receiver.ask("buffer to 1000 -1")
    receiver.ask("irecv r c to 1000 0")
    sender.send_signal(signal.SIGKILL)
    with pytest.raises(CallFailedError) as failure:
        receiver.ask(f"wait {WAIT_S} r")
    assert failure.value.result == 6  # ncclRemoteError


def test_stream_between_lab_hosts_is_measured(make_driver: MakeDriver, make_lab: MakeLab) -> None:
    lab = make_lab(2)
    lab.shape("1gbit")
    sender, receiver = (make_driver(host=host) for host in lab.hosts)
    pair = Pair(sender, receiver, lanes=2)
    stream = pair.stream(Plan(message_bytes=1_500_000, messages=6, acknowledge_every=2), lanes=2)
    assert stream.moved_bytes == 2 * 6 * 1_500_000
    # the bucket of the shaper holds 256 kB; more than the line rate would mean that bytes were not moved
    assert 0 < stream.gigabytes_per_s < 0.14
    assert stream.round_s <= stream.took_s
    assert all(cpu_s > 0 for cpu_s in stream.cpu_s)


def test_own_initialization_of_nccl_assigns_a_network(make_driver: MakeDriver) -> None:
    driver = make_driver("assigned", NCCL_NET_PLUGIN="none")
    assert driver.network == "Socket"
    assert driver.ask("devices") == ["1"]


def test_line_that_is_wrong_is_refused_and_the_driver_goes_on(make_driver: MakeDriver) -> None:
    driver = make_driver()
    for line in ("no-such-call", "listen", "isend s c b 1 0", "check nothing 1 1", "test r"):
        with pytest.raises(DriverError, match="bad "):
            driver.ask(line)
    driver.ask("init")


def test_library_without_the_symbols_ends_the_driver_with_a_message(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libnccl.so"
    source.write_text("int ncclGetVersion(int* version) { *version = 1; return 0; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True, timeout=HANG_S)
    with pytest.raises(DriverError, match=r"no symbol cudaGetDevice .*libnccl 2\.30\.7"):
        Driver(build.driver(), ["sockets", library])
    subprocess.run(["strip", library], check=True, timeout=HANG_S)
    with pytest.raises(DriverError, match=r"no symbol table .*stripped"):
        Driver(build.driver(), ["sockets", library])
    with pytest.raises(DriverError, match="libnccl does not load"):
        Driver(build.driver(), ["sockets", tmp_path / "absent.so"])
