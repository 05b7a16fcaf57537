"""gRPC does not measure the bandwidth to etcd: each measurement is a ping, after almost every message of a watch."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from bagua_agent.etcd.client import Store
from bagua_agent.etcd.mirror import Change, PrefixMirror
from tests.agent.etcd.conftest import Recorder, Server
from tests.lab.recorded_relay import RecordedRelay, frames, pings, window_bytes

PUTS = 10
MakeStore = Callable[..., Store]


@pytest.fixture
def relay(tcp_server: Server) -> Iterator[RecordedRelay]:
    host, _, port = tcp_server.endpoint.removeprefix("http://").rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))
    relay = RecordedRelay(listener, lambda: socket.create_connection((host, int(port))))
    yield relay
    relay.end()


def holds(value: bytes, batches: list[tuple[Change, ...]]) -> bool:
    return any(change.value == value for batch in batches for change in batch)


def test_changes_and_requests_cause_no_pings(relay: RecordedRelay, make_store: MakeStore) -> None:
    store = make_store(f"127.0.0.1:{relay.port}")
    changes: Recorder[tuple[Change, ...]] = Recorder()
    mirror = PrefixMirror(store, "/m/", changes)
    mirror.start()
    for number in range(PUTS):
        store.put("/m/key", str(number).encode())
        changes.wait_for(partial(holds, str(number).encode()))
    mirror.stop()
    assert len(relay.asked) == 2, "the mirror's connection and the store's"
    assert sum(1 for stream in relay.answered for _ in frames(bytes(stream))) > 2 * PUTS
    assert [pings(bytes(stream)) for stream in relay.asked] == [0, 0]
    assert [window_bytes(bytes(stream)) for stream in relay.asked] == [4 << 20] * 2
