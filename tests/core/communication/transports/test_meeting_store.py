"""The store in which members meet: waits for keys, survives strangers, forgets old generations."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from bagua_core.communication.communicator import AbortFlag, ReduceOp
from bagua_core.communication.transports.gloo import build_gloo
from bagua_core.communication.transports.meeting_store import (
    GENERATIONS_KEPT,
    MeetingServer,
    MeetingStore,
    MeetingStoreError,
)
from tests.lab.wait import HANG_S

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[4]


@pytest.fixture
def server():
    made = MeetingServer(HOST)
    yield made
    made.close()
    assert not made._thread.is_alive()


def test_a_get_waits_until_the_key_is_set(server):
    reader, writer = (MeetingStore(HOST, server.port, 5.0) for _ in range(2))
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(reader.get("job/1/all/0")))
    thread.start()
    writer.set("job/1/all/0", b"address")
    thread.join(5.0)
    assert found == [b"address"]
    assert writer.get("job/1/all/0") == b"address"


def test_a_key_that_never_comes_ends_in_time_and_says_which(server):
    store = MeetingStore(HOST, server.port, 0.2)
    with pytest.raises(MeetingStoreError, match="job/1/all/7"):
        store.get("job/1/all/7")


def test_interrupt_ends_a_wait_at_once(server):
    store = MeetingStore(HOST, server.port, 60.0)
    threading.Timer(0.1, store.interrupt).start()
    began_s = time.monotonic()
    with pytest.raises(MeetingStoreError):
        store.get("job/1/all/7")
    assert time.monotonic() - began_s < 5.0


def test_an_absent_host_is_one_error():
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(MeetingStoreError, match=str(port)):
        MeetingStore(HOST, port, 1.0)


@pytest.mark.parametrize(
    "junk", [b"GET / HTTP/1.1\r\n\r\n" * 10, b"\xff" * 100, b"\x00\x00\x00\x02\x09\x00\x01ab"]
)
def test_a_stranger_is_hung_up_on_and_others_are_served(server, junk):
    with socket.create_connection((HOST, server.port), timeout=HANG_S) as stranger:
        stranger.sendall(junk)
        assert stranger.recv(1) == b""
    store = MeetingStore(HOST, server.port, 5.0)
    store.set("job/1/all/0", b"x")
    assert store.get("job/1/all/0") == b"x"


def test_a_client_that_dies_while_it_waits_leaves_nothing_behind(server):
    store = MeetingStore(HOST, server.port, 5.0)
    store._send(b"\x00\x00\x00\x01\x02\x00\x01k", time.monotonic() + 5.0)
    store.close()
    other = MeetingStore(HOST, server.port, 5.0)
    deadline_s = time.monotonic() + 5.0
    while server._waiting and time.monotonic() < deadline_s:
        other.set("job/2/all/0", b"x")
    assert not server._waiting


def test_old_generations_are_dropped(server):
    store = MeetingStore(HOST, server.port, 0.2)
    for generation in range(GENERATIONS_KEPT + 1):
        store.set(f"job/{generation}/all/0", b"x")
    other = MeetingStore(HOST, server.port, 0.2)
    assert other.get(f"job/{GENERATIONS_KEPT}/all/0") == b"x"
    with pytest.raises(MeetingStoreError):
        other.get("job/0/all/0")


def test_gloo_meets_through_it(server):
    import torch

    sums: dict[int, float] = {}

    def member(global_rank: int) -> None:
        store = MeetingStore(HOST, server.port, 10.0)
        communicator = build_gloo(
            1, global_rank, 3, PrefixStore("nonce/1/all", store), HOST, 10.0, AbortFlag()
        )
        store.close()
        tensor = torch.ones(4)
        communicator.allreduce(tensor, ReduceOp.SUM).wait()
        sums[global_rank] = float(tensor.sum())

    threads = [threading.Thread(target=member, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert sums == {0: 12.0, 1: 12.0, 2: 12.0}


SHORT_OF_DESCRIPTORS = """
import os, resource, socket, time
from bagua_core.communication.transports.meeting_store import MeetingServer, MeetingStore

server = MeetingServer("127.0.0.1")
early = MeetingStore("127.0.0.1", server.port, 10.0)
early.set("job/1/all/0", b"x")
assert early.get("job/1/all/0") == b"x"  # so it is accepted
calling = [socket.socket() for _ in range(2)]
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))
held = []
while True:
    try:
        held.append(os.dup(0))
    except OSError:
        break
for sock in calling:
    sock.settimeout(10.0)
    sock.connect(("127.0.0.1", server.port))  # the kernel's backlog takes it; accept cannot
early.set("job/1/all/1", b"y")
began_s = time.process_time()
assert early.get("job/1/all/1") == b"y", "those that are in are served"
deadline_s = time.monotonic() + 0.5
while time.monotonic() < deadline_s:
    early.set("job/1/all/2", b"z")
    time.sleep(0.05)  # idle time is what is measured
assert time.process_time() - began_s < 0.3, "the server spins"
for fd in held:
    os.close(fd)
calling[1].sendall(b"\\x00\\x00\\x00\\x0b\\x02\\x00\\x0bjob/1/all/1")
assert calling[1].recv(100).endswith(b"y"), "accepted once there was a descriptor"
server.close()
assert not server._thread.is_alive()
print("served")
"""


def test_without_a_descriptor_callers_wait_and_the_others_are_served():
    path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
    ended = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
    )
    assert ended.returncode == 0 and ended.stdout.endswith("served\n"), ended.stdout
