"""Links get the delay that was asked for, keep their rate, and are as before when it is over."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.relay import Relay, delayed
from tests.lab import namespaces
from tests.lab.namespaces import LabError
from tests.lab.network import Host, Lab

PORT = 7300
RATE_MBIT = 100


@pytest.fixture
def lab() -> Iterator[Lab]:
    if reason := namespaces.unavailable():
        pytest.skip(reason)
    with Lab(3) as made:
        yield made


def connected(client: Host, server: Host) -> tuple[socket.socket, socket.socket]:
    with server.listen(PORT) as listening:
        near = client.connect((server.address, PORT), 5)
        far, _ = listening.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(10)
    return near, far


def least_round_trip_s(client: Host, server: Host) -> float:
    """Of some: whatever else runs on this machine makes others longer."""
    near, far = connected(client, server)
    with near, far:
        found = []
        for _ in range(10):
            began_s = time.perf_counter()
            near.sendall(b"x")
            far.recv(1)
            far.sendall(b"y")
            near.recv(1)
            found.append(time.perf_counter() - began_s)
    return min(found)


def mbit_per_s(client: Host, server: Host, total_bytes: int) -> float:
    near, far = connected(client, server)
    with near, far:
        sending = threading.Thread(target=near.sendall, args=(bytes(total_bytes),))
        began_s = time.perf_counter()
        sending.start()
        received = 0
        while received < total_bytes:
            received += len(far.recv(1 << 20))
        took_s = time.perf_counter() - began_s
        sending.join()
    return total_bytes * 8 / took_s / 1e6


def test_a_round_trip_takes_the_delay_twice_and_no_longer_afterwards(lab: Lab) -> None:
    first, second = lab.hosts[0], lab.hosts[2]
    before_s = least_round_trip_s(first, second)
    with delayed(lab, 0.005) as accounts:
        during_s = least_round_trip_s(first, second)
    print(f"measured: round trip {before_s * 1e3:.2f} ms, delayed {during_s * 1e3:.2f} ms")
    assert 0.010 <= during_s - before_s < 0.012
    assert least_round_trip_s(first, second) < 0.005
    assert accounts[0].forwarded >= 20


@pytest.mark.long
def test_a_delayed_link_keeps_its_rate(lab: Lab) -> None:
    lab.shape(f"{RATE_MBIT}mbit")
    with delayed(lab, 0.005) as accounts:
        measured = mbit_per_s(lab.hosts[0], lab.hosts[1], 12_500_000)
    (account,) = accounts
    print(f"measured: {measured:.0f} Mbit/s, {account}")
    assert measured == pytest.approx(RATE_MBIT, rel=0.2)
    assert account.late <= account.forwarded / 20


def test_a_delayed_link_can_be_cut_and_heals(lab: Lab) -> None:
    near, far = connected(lab.hosts[0], lab.hosts[1])
    with near, far, delayed(lab, 0.001):
        lab.hosts[1].cut()
        near.sendall(b"late")
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.recv(4)
        lab.hosts[1].heal()
        far.settimeout(10)
        assert far.recv(4) == b"late"


def test_a_relay_that_died_is_reported_and_the_links_work_again(lab: Lab) -> None:
    relay = Relay(lab, 0.005)
    (pid,) = namespaces.pids_in(lab.switch)
    namespaces.kill_all(lab.switch)
    with pytest.raises(LabError, match="the relay ended"):
        relay.stop()
    assert namespaces.start_time_of(pid) is None
    assert least_round_trip_s(lab.hosts[0], lab.hosts[1]) < 0.005


@pytest.mark.parametrize("delay_s", [0.0, -1.0, 2.0])
def test_a_delay_out_of_range_is_refused(lab: Lab, delay_s: float) -> None:
    with pytest.raises(LabError, match=f"a delay of {delay_s} s"):
        Relay(lab, delay_s)
