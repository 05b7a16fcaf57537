"""The end of a shard is reported once and at once; that of a shard that leaves in order is not."""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from bagua_core.elastic.replica.shard_watch import ShardWatch, WatchFailed, connect
from tests.lab.ipv6 import IPV6_HERE, needs_ipv6

WITHIN_S = 20.0
HERE = "127.0.0.1"


class Shards:
    """A watch for each shard of a replica in this process, and what each of them reported."""

    def __init__(self, size: int, store: Store | None = None, here: str = HERE) -> None:
        shared = store or HashStore()
        shared.set_timeout(timedelta(seconds=WITHIN_S))
        with ThreadPoolExecutor(size) as pool:
            links = list(
                pool.map(lambda shard: connect(shared, shard, size, here, here, WITHIN_S), range(size))
            )
        self.lost: list[queue.SimpleQueue[int]] = [queue.SimpleQueue() for _ in range(size)]
        self.watches = [ShardWatch(of, lost.put) for of, lost in zip(links, self.lost, strict=True)]

    def close(self) -> None:
        for watch in self.watches:
            watch.close(in_order=True)


@pytest.fixture
def shards() -> Iterator[Shards]:
    three = Shards(3)
    yield three
    three.close()


def watching() -> int:
    return sum(thread.name == "bagua-mates" for thread in threading.enumerate())


def test_the_end_of_a_shard_is_reported(shards: Shards) -> None:
    shards.watches[2].close(in_order=False)
    assert shards.lost[0].get(timeout=WITHIN_S) == 2
    assert shards.lost[1].empty(), "shard 1 has no connection to shard 2"


def test_the_end_of_the_first_shard_is_reported_by_all(shards: Shards) -> None:
    shards.watches[0].close(in_order=False)
    assert [shards.lost[shard].get(timeout=WITHIN_S) for shard in (1, 2)] == [0, 0]


def test_a_farewell_is_no_loss(shards: Shards) -> None:
    shards.watches[1].close(in_order=True)
    shards.watches[2].close(in_order=False)
    assert shards.lost[0].get(timeout=WITHIN_S) == 2 and shards.lost[0].empty()


def test_no_thread_is_left(shards: Shards) -> None:
    assert watching() == 3
    shards.close()
    assert watching() == 0


def test_a_forked_child_does_not_hold_a_connection(shards: Shards) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        shards.watches[2].close(in_order=False)
        assert shards.lost[0].get(timeout=WITHIN_S) == 2
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class WithStranger(HashStore):
    """Another process calls shard 0 before the others learn where it listens."""

    def set(self, key: str, value: str) -> None:
        self.stranger = socket.create_connection((HERE, int(value.split()[0])))
        self.stranger.sendall(bytes(16) + b"\0\0\0\1")
        super().set(key, value)


def test_a_stranger_takes_no_place() -> None:
    store = WithStranger()
    two = Shards(2, store)
    store.stranger.close()
    two.watches[1].close(in_order=False)
    assert two.lost[0].get(timeout=WITHIN_S) == 1
    two.close()


class WithSilentStrangers(HashStore):
    def set(self, key: str, value: str) -> None:
        port = int(value.split()[0])
        self.strangers = [socket.create_connection((HERE, port)) for _ in range(12)]
        super().set(key, value)


def test_strangers_that_say_nothing_keep_no_shard_waiting() -> None:
    store = WithSilentStrangers()
    two = Shards(2, store)
    for stranger in store.strangers:
        assert not stranger.recv(1), "it is sent away"
        stranger.close()
    two.watches[1].close(in_order=False)
    assert two.lost[0].get(timeout=WITHIN_S) == 1
    two.close()


def test_a_shard_that_does_not_come_is_named() -> None:
    with pytest.raises(WatchFailed, match="shard 1, 2 did not connect in time"):
        connect(HashStore(), 0, 3, HERE, HERE, 0.05)


@needs_ipv6
def test_shards_meet_over_ipv6() -> None:
    two = Shards(2, here=IPV6_HERE)
    two.watches[1].close(in_order=False)
    assert two.lost[0].get(timeout=WITHIN_S) == 1
    two.close()
