"""Gloo beyond the contract: real peers that die or freeze, its messages, and the life of its group."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import FileStore, HashStore

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed, Pending
from bagua_core.communication.transports import gloo, gloo_connect, retired_groups
from bagua_core.communication.transports.gloo_connect import Connecting, WatchedStore
from bagua_core.communication.transports.gloo_errors import collective_failed, peers_in
from tests.core.communication.worlds import DEADLINE_S, await_true, gloo_world, run_ranks

PEER = Path(__file__).with_name("gloo_peer.py")
ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("message", "hosts"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.7]:49590: "
            "Connection reset by peer. This is typically caused by a remote worker hanging",
            ("10.0.0.7",),
        ),
        ("[/x/pair.cc:553] Connection closed by peer [::1]:11185. This is", ("::1",)),
        ("[x.cc:1] connect error, local=[10.0.0.1]:4, remote=[10.0.0.2]:5", ("10.0.0.2",)),
        ("[/x/unbound_buffer.cc:129] Timed out waiting 1000ms for send operation to complete", ()),
        ("[/x/pair.cc:1] Read error [fe80::1%eth0]:1: reset", ("fe80::1%eth0",)),
    ],
)
def test_peers_are_read_from_the_text(message: str, hosts: tuple[str, ...]) -> None:
    assert peers_in(message) == hosts


def test_the_text_is_cut_to_what_happened() -> None:
    error = collective_failed(
        "allreduce", RuntimeError("[/a/b.cc:5] Read error [1.2.3.4]:5: reset. This is typically caused by x")
    )
    assert error.detail == "allreduce: Read error [1.2.3.4]:5: reset."
    assert error.hosts == ("1.2.3.4",)


class Peer:
    def __init__(self, store_path: str) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "protos")])
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), store_path],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        # Else a busy machine's import takes the time to connect
        assert self.process.stdout.readline() == b"imported\n"
        store = FileStore(store_path, 2)
        self.communicator = gloo.build_gloo(1, 0, 2, store, "127.0.0.1", 20.0, AbortFlag())
        self.communicator.allreduce(torch.ones(4)).wait()
        self.communicator.allreduce(torch.ones(4)).wait()
        assert self.process.stdout.readline() == b"idle\n"

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    made = Peer(str(tmp_path / "store"))
    yield made
    made.end()


def test_a_killed_peer_is_named_at_once(peer: Peer) -> None:
    pending = peer.communicator.allreduce(torch.ones(4))
    receiving = peer.communicator.receive(torch.ones(4), source=1, tag=5)
    began_s = time.monotonic()
    peer.process.kill()
    for waiting in (pending, receiving):
        with pytest.raises(CollectiveFailed) as caught:
            waiting.wait()
        assert not isinstance(caught.value, CollectiveAborted)
        assert caught.value.hosts == ("127.0.0.1",)
    assert time.monotonic() - began_s < 0.5
    for what in (
        peer.communicator.allreduce(torch.ones(4)),
        peer.communicator.send(torch.ones(4), 1, 1),
        peer.communicator.receive(torch.ones(4), 1, 1),
        peer.communicator.broadcast(torch.ones(4), 0),
        peer.communicator.alltoall(torch.zeros(2, 4), torch.ones(2, 4)),
        peer.communicator.reduce_scatter(torch.zeros(4), torch.ones(2, 4)),
        peer.communicator.reduce(torch.ones(4), 0),
        peer.communicator.gather(torch.zeros(2, 4), torch.ones(4), 0),
        peer.communicator.scatter(torch.ones(4), None, 1),
        peer.communicator.barrier(),
    ):
        with pytest.raises(CollectiveFailed, match=r"127\.0\.0\.1"):
            what.wait()


def test_a_frozen_peer_is_given_up_on_abort(peer: Peer) -> None:
    os.kill(peer.process.pid, signal.SIGSTOP)
    pending = peer.communicator.allreduce(torch.ones(1 << 20))

    def wait() -> None:
        with pytest.raises(CollectiveAborted):
            pending.wait()

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.1)
    assert waiter.is_alive(), "the peer is frozen, so nothing can have arrived"
    peer.communicator.abort("frozen")
    waiter.join(5.0)
    assert not waiter.is_alive(), "the abort releases it, long before Gloo's own limit"
    assert not pending.is_done(), "the operation itself still waits for the peer"
    peer.process.kill()
    await_true(pending.is_done, "Gloo to notice the end of the peer")


def test_a_group_that_was_aborted_or_failed_is_kept() -> None:
    first, second = gloo_world(2)
    before = len(retired_groups._retired)
    first.abort("x")
    first.abort("again")
    assert len(retired_groups._retired) == before + 1
    assert retired_groups._retired[-1] is first._group
    second.abort("x")


def test_a_group_that_is_closed_ends_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destructor joins Gloo's threads, and the script's thread is between two steps."""
    ended_in: list[str] = []

    class Group:
        def __del__(self) -> None:
            ended_in.append(threading.current_thread().name)

    class Quick(threading.Thread):
        """One that has ended before its starter goes on."""

        def start(self) -> None:
            super().start()
            self.join(DEADLINE_S)

    monkeypatch.setattr(threading, "Thread", Quick)
    communicator = gloo.GlooCommunicator(Group(), 1, 0, 2, AbortFlag(), DEADLINE_S)
    communicator.close()
    communicator.close()
    assert ended_in == ["gloo-close"]


def test_building_for_a_generation_given_up_meanwhile() -> None:
    flag = AbortFlag()
    flag.set("superseded")
    store = HashStore()
    with pytest.raises(CollectiveAborted, match="superseded"):
        gloo.build_gloo(3, 0, 1, store, "127.0.0.1", 5.0, flag)


def test_building_without_the_others_fails_in_time() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(CollectiveFailed, match="generation 3"):
        gloo.build_gloo(3, 0, 2, store, "127.0.0.1", 0.5, AbortFlag())


def test_an_address_that_is_not_here_is_named() -> None:
    store = HashStore()
    with pytest.raises(CollectiveFailed, match=r"192\.0\.2\.1"):
        gloo.build_gloo(3, 0, 1, store, "192.0.2.1", 5.0, AbortFlag())


def test_what_gloo_cannot_carry_is_refused() -> None:
    (only,) = gloo_world(1)
    with pytest.raises(ValueError, match="contiguous"):
        only.allreduce(torch.ones(2, 3).t())
    with pytest.raises(ValueError, match="CPU"):
        only.allreduce(torch.ones(1, device="meta"))


TCP_INFO_BYTES_RECEIVED = slice(128, 136)  # of the kernel's struct tcp_info


def received_bytes() -> int:
    """By all TCP connections of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            own = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed meanwhile
        with own:
            if own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM:
                info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += int.from_bytes(info[TCP_INFO_BYTES_RECEIVED], sys.byteorder)
    return total


@pytest.mark.parametrize(
    ("what", "parts_a_rank"),
    [
        ("alltoall", 3),
        ("reduce_scatter", 3),
        ("allgather", 3),
        ("allreduce", 6),
        ("reduce", 3 + 3 / 4),
        ("gather", 3 / 4),
    ],
)
def test_no_part_crosses_the_network_twice(what: str, parts_a_rank: float) -> None:
    """Of four ranks, each with four parts of a megabyte: how many each receives, on average."""
    part_bytes, world = 1 << 20, gloo_world(4)

    def act(c: gloo.GlooCommunicator) -> None:
        parts = torch.ones((4, part_bytes // 4))
        if what == "reduce_scatter":
            c.reduce_scatter(torch.empty(part_bytes // 4), parts).wait()
        elif what == "alltoall":
            c.alltoall(torch.empty_like(parts).view(torch.uint8), parts.view(torch.uint8)).wait()
        elif what == "allgather":
            c.allgather(torch.empty_like(parts), parts[0]).wait()
        elif what == "gather":
            c.gather(torch.empty_like(parts) if c.global_rank == 0 else None, parts[0], 0).wait()
        elif what == "reduce":
            c.reduce(parts, 0).wait()
        else:
            c.allreduce(parts).wait()

    before = received_bytes()
    run_ranks(world, act)
    moved = (received_bytes() - before) / part_bytes / 4
    assert moved == pytest.approx(parts_a_rank, rel=0.02)


def test_waits_end_while_another_thread_keeps_the_interpreter_busy() -> None:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    busy = threading.Thread(target=spin)
    members = gloo_world(2)
    busy.start()
    try:
        began_s = time.monotonic()

        def act(c: gloo.GlooCommunicator) -> None:
            for _ in range(10):
                c.allreduce(torch.ones(4)).wait()

        run_ranks(members, act)
        # each hand-over of the interpreter costs its switch interval, 5 ms
        assert time.monotonic() - began_s < 2.0
    finally:
        stop.set()
        busy.join(5.0)


def test_a_short_limit_for_connecting_does_not_bound_what_comes_later() -> None:
    """Every operation outlasts it while one rank comes late, and is done all the same."""
    limit_s = 0.4
    store = HashStore()

    def build(global_rank: int) -> gloo.GlooCommunicator:
        return gloo.build_gloo(1, global_rank, 2, store, "127.0.0.1", 20.0, AbortFlag(), limit_s)

    members = run_ranks([0, 1], build)
    late = threading.Event()

    def act(c: gloo.GlooCommunicator) -> None:
        other, ones = 1 - c.global_rank, torch.ones(2)
        operations: list[Callable[[], Pending]] = [
            lambda: c.allreduce(ones.clone()),
            lambda: c.broadcast(ones.clone(), 1),
            lambda: c.allgather(torch.zeros(2, 2), ones),
            lambda: c.alltoall(torch.zeros(2, 2), torch.ones(2, 2)),
            lambda: c.reduce_scatter(torch.zeros(2), torch.ones(2, 2)),
            lambda: c.receive(torch.zeros(2), other, 5) if c.global_rank == 0 else c.send(ones, other, 5),
        ]
        for operation in operations:
            if c.global_rank == 1:
                late.wait(3 * limit_s)  # never set: the other rank waits for so long
            operation().wait()

    run_ranks(members, act)


class Vanished:
    """A member of two that has said where it listens, and answers no connection: its host is gone."""

    def __init__(self, ports: range) -> None:
        self._sockets = [socket.socket()]
        for port in ports:
            try:
                self._sockets[0].bind(("127.0.0.1", port))
                break
            except OSError:
                continue
        self.port = self._sockets[0].getsockname()[1]
        self._sockets[0].listen(0)
        for _ in range(2):  # the system drops what comes to a full queue
            self._sockets.append(socket.socket())
            self._sockets[-1].setblocking(False)
            self._sockets[-1].connect_ex(("127.0.0.1", self.port))

    def publish(self, store: HashStore) -> None:
        """As global rank 1 of generation 3."""
        said: list[str] = []

        class Listening(WatchedStore):
            def set(self, key: str, value: str | bytes) -> None:  # type: ignore[override]
                said.append(key)
                super().set(key, value)

            def get(self, key: str) -> bytes:
                raise RuntimeError("it vanishes")

            def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:  # type: ignore[override]
                raise RuntimeError("it vanishes")

        with pytest.raises(CollectiveFailed, match="vanishes"):
            gloo.build_gloo(3, 1, 2, Listening(store), "127.0.0.1", 600.0, AbortFlag(), 0.5)
        (key,) = said
        told = bytes(store.get(key))
        loopback = bytes((127, 0, 0, 1))
        at = told.index(loopback)
        store.set(key, told[: at - 2] + struct.pack(">H", self.port) + told[at:])

    def close(self) -> None:
        for each in self._sockets:
            each.close()


@pytest.fixture(params=[range(20000, 32768), range(61000, 65536)], ids=["we connect", "it connects"])
def vanished(request: pytest.FixtureRequest) -> Iterator[HashStore]:
    """Gloo lets the member with the lower address, or the higher one, connect to the other."""
    made, store = Vanished(request.param), HashStore()
    made.publish(store)
    yield store
    made.close()


def test_a_member_that_vanishes_while_it_connects_is_given_up_in_time(
    vanished: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo_connect, "LIMITS", 1.0)
    began_s = time.monotonic()
    with pytest.raises(CollectiveFailed, match="connecting generation 3 from 127"):
        gloo.build_gloo(3, 0, 2, vanished, "127.0.0.1", 600.0, AbortFlag(), 2.0)
    assert time.monotonic() - began_s < 7.0, "Gloo alone takes five limits"


def test_connecting_ends_when_the_generation_is_given_up(vanished: HashStore) -> None:
    flag = AbortFlag()
    began_s = time.monotonic()
    timer = threading.Timer(0.2, flag.set, ["superseded"])
    timer.start()
    with pytest.raises(CollectiveAborted, match="superseded"):
        gloo.build_gloo(3, 0, 2, vanished, "127.0.0.1", 600.0, flag, 20.0)
    assert time.monotonic() - began_s < 10.0
    timer.join()


def test_a_group_that_is_complete_after_it_was_given_up_is_retired() -> None:
    complete, flag, retired = threading.Event(), AbortFlag(), []
    connecting = Connecting(lambda: complete.wait(DEADLINE_S), retired.append)
    flag.set("superseded")
    with pytest.raises(CollectiveAborted):
        connecting.group(WatchedStore(HashStore()), 600.0, flag)
    assert not retired
    complete.set()
    await_true(lambda: retired == [True], "it is retired")


def test_connecting_to_a_member_that_never_comes_ends_in_time() -> None:
    began_s = time.monotonic()
    with pytest.raises(CollectiveFailed):
        gloo.build_gloo(3, 0, 2, HashStore(), "127.0.0.1", 600.0, AbortFlag(), 0.5)
    assert time.monotonic() - began_s < 5.0
