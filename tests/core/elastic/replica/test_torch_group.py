"""Torch's group of a replica connects in bounded time and over both versions of IP."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from bagua_core.communication.transports.meeting_store import MeetingServer, MeetingStore
from bagua_core.elastic.replica import torch_group
from tests.lab.ipv6 import IPV6_HERE, needs_ipv6
from tests.lab.wait import HANG_S

HERE = "127.0.0.1"
BOTH_VERSIONS = pytest.mark.parametrize("host", [HERE, pytest.param(IPV6_HERE, marks=needs_ipv6)])


def in_children(*calls: Callable[[], Any]) -> list[Any]:
    """What each returns, in a child of this process: torch's default group is one for the whole process."""
    forking = multiprocessing.get_context("fork")
    results: Any = forking.Queue()

    def run(number: int, call: Callable[[], Any]) -> None:
        try:
            results.put((number, call()))
        except Exception as error:  # noqa: BLE001 (raised by the parent)
            results.put((number, error))

    children = [forking.Process(target=run, args=each) for each in enumerate(calls)]
    for child in children:
        child.start()
    try:
        found = dict(results.get(timeout=HANG_S) for _ in children)
    finally:
        for child in children:
            child.kill()
            child.join()
    for result in found.values():
        if isinstance(result, Exception):
            raise result
    return [found[number] for number in range(len(calls))]


@BOTH_VERSIONS
def test_shards_share_a_store(host: str) -> None:
    meeting = HashStore()
    served = torch_group.shared_store(meeting, 0, host, host)
    served.set("said", "by shard 0")
    reached = torch_group.shared_store(meeting, 1, host, host)
    assert reached.get("said") == b"by shard 0"


def two_shards(host: str, late_s: float) -> list[float]:
    """What each has of a message that shard 0 sends to shard 1 so late after they have connected."""
    server = MeetingServer(host)

    def shard(shard_rank: int) -> float:
        meeting = MeetingStore(host, server.port, HANG_S)
        store = torch_group.shared_store(meeting, shard_rank, host, host)
        torch_group.make(store, shard_rank, 2, host)
        value = torch.full((1,), 7.0 * (shard_rank == 0))
        if shard_rank == 0:
            time.sleep(late_s)
            torch.distributed.send(value, 1)
        else:
            torch.distributed.recv(value, 0)
        torch.distributed.barrier()  # shard 0 serves the store
        return float(value)

    try:
        return in_children(lambda: shard(0), lambda: shard(1))
    finally:
        server.close()


@BOTH_VERSIONS
def test_shards_connect(host: str) -> None:
    assert two_shards(host, 0.0) == [7.0, 7.0]


def test_a_message_may_come_later_than_the_limit_for_connecting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "CONNECT_TIMEOUT", timedelta(seconds=5))
    assert two_shards(HERE, 5.5) == [7.0, 7.0]


def test_a_group_that_a_shard_does_not_join_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_group, "CONNECT_TIMEOUT", timedelta(seconds=1))

    def alone() -> tuple[str, float, bool]:
        began_s = time.monotonic()
        with pytest.raises(torch_group.GroupNotConnected) as raised:
            torch_group.make(HashStore(), 0, 2, HERE)
        return str(raised.value), time.monotonic() - began_s, torch_group.is_made()

    [(error, waited_s, is_made)] = in_children(alone)
    assert error == "torch's group did not connect within 1 s"
    assert 1.0 <= waited_s < 10.0 and not is_made


def test_what_torch_raises_is_raised() -> None:
    def twice() -> str:
        torch_group.make(HashStore(), 0, 1, HERE)
        with pytest.raises(ValueError) as raised:
            torch_group.make(HashStore(), 0, 1, HERE)
        return str(raised.value)

    assert "default process group twice" in in_children(twice)[0]
