"""Bagua-Net under AddressSanitizer, UBSan and ThreadSanitizer; and each sanitizer finds a fault that is put in.

The plugin and its driver are compiled under each sanitizer once per version of the sources (25 s of processor time).
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from benchmarks.net_driver import build
from benchmarks.net_driver.pair import connect
from benchmarks.net_driver.process import CallFailedError, Driver, DriverError
from tests.net.exchange import WAIT_S, close, connect_in_any_order, move, move_group

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

SIZES = [0, 1, 4057, 65_537, 1_000_003, 16 << 20]
BIG = 8 << 20  # sixteen are more than the kernel takes
REPORTS = ("ERROR: ", "WARNING: ThreadSanitizer", "runtime error:")


def sanitized(sanitizer: str, **env: str) -> Driver:
    words = ["plugin", build.plugin(sanitizer), "12"]
    driver = Driver(build.driver(sanitizer), words, {"NCCL_SOCKET_IFNAME": "lo", **env})
    driver.ask("init")
    return driver


@contextmanager
def clean_pair(sanitizer: str, **env: str) -> Iterator[tuple[Driver, Driver]]:
    """Sender and receiver; at the end both end by themselves, without a report and without a leak."""
    with ExitStack() as drivers:
        pair = [drivers.enter_context(sanitized(sanitizer, **env)) for _ in range(2)]
        yield pair[0], pair[1]
        for driver in pair:
            driver.ask("finalize")
            code, said = driver.close(), driver.errors()
            assert code == 0 and not any(report in said for report in REPORTS), f"{code}\n{said}"


def exercise(sender: Driver, receiver: Driver, draw: random.Random, comms: int) -> None:
    """What NCCL does with a network, and what it does when a job is aborted."""
    names = [f"c{number}" for number in range(comms)]
    connect_in_any_order(sender, receiver, names, draw)
    for seed, size in enumerate(draw.sample(SIZES, len(SIZES))):
        move(sender, receiver, draw.choice(names), size, seed, room=size + draw.randrange(9))
    move_group(sender, receiver, names[0], draw.sample([0, 1, 77, 5000, 40_000, 70_001, 300_000, 9], 8), draw)
    for name in names:
        close(sender, receiver, name)
    for end in ("send", "receive"):
        abort_in_flight(sender, receiver, end)
    close_early(sender, receiver)


def abort_in_flight(sender: Driver, receiver: Driver, first: str) -> None:
    """One side closes with messages under way; a request of the other one that can't be whole fails."""
    connect(receiver, sender, "a")
    sender.ask(f"buffer from {BIG} 1")
    receives, sends = (3, 2) if first == "send" else (2, 16)
    for number in range(receives):
        receiver.ask(f"buffer to{number} {BIG} -1")
        receiver.ask(f"irecv r{number} a to{number} {BIG} 0")
    for number in range(sends):
        sender.ask(f"isend s{number} a from {BIG} 0")
    receiver.ask("wait 0.001 r0")
    closing, other, last = (sender, receiver, "r2") if first == "send" else (receiver, sender, "s15")
    closing.ask(f"close-{first} a")
    with pytest.raises(CallFailedError, match="failed 6"):
        other.ask(f"wait 15 {last}")
    other.ask(f"close-{'receive' if first == 'send' else 'send'} a")
    receiver.ask("close-listen a-listen")


def close_early(sender: Driver, receiver: Driver) -> None:
    """A listener is closed before it accepts, and so is a connection that has said its hello."""
    handle = receiver.ask("listen e-listen 0")[0]
    deadline_s = time.monotonic() + WAIT_S
    while sender.ask(f"connect e 0 {handle}") != ["ready"]:
        assert time.monotonic() < deadline_s
    receiver.ask("close-listen e-listen")
    sender.ask("close-send e")


@pytest.mark.parametrize("threads", ["0", "2"])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_reported(sanitizer: str, threads: str) -> None:
    with clean_pair(sanitizer, BAGUA_NET_THREADS=threads) as (sender, receiver):
        exercise(sender, receiver, random.Random(19), comms=4)


@pytest.mark.long
@pytest.mark.parametrize("streams", ["1", "8", "16"])
@pytest.mark.parametrize("threads", ["0", "1", "4"])
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_reported_at_other_settings(sanitizer: str, threads: str, streams: str) -> None:
    env = {"BAGUA_NET_THREADS": threads, "BAGUA_NET_STREAMS": streams, "BAGUA_NET_CHUNK_BYTES": "65536"}
    with clean_pair(sanitizer, **env) as (sender, receiver):
        for seed in range(8):
            exercise(sender, receiver, random.Random(seed), comms=12)


FAULTS = [
    ("address", "overflow", "AddressSanitizer: heap-buffer-overflow", "bagua::accepts"),
    ("address", "undefined", "signed integer overflow", "sabotage.cc"),
    ("address", "leak", "LeakSanitizer: detected memory leaks", "sabotage.cc"),
    ("thread", "race", "ThreadSanitizer: data race", "bagua::Communicator::adopt"),
]


@pytest.mark.parametrize(("sanitizer", "fault", "report", "where"), FAULTS)
def test_sanitizer_finds_a_fault_in_the_plugin(sanitizer: str, fault: str, report: str, where: str) -> None:
    try:
        with sanitized(sanitizer, NET_SABOTAGE=fault) as driver:
            driver.ask(f"connect c 0 {driver.ask('listen l 0')[0]}")
            code, said = driver.close(), driver.errors()
    except DriverError as error:
        code, said = 1, str(error)
    assert code != 0 and report in said and where in said, said
