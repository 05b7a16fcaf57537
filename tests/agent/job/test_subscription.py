"""The keys that an agent of a large job sees from its start on; with a real etcd that stops answering."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job import subscription
from bagua_agent.job.messages import StoreChanged
from bagua_agent.job.new_identity import make_identity
from bagua_agent.job.subscription import JobSubscription
from bagua_agent.large_jobs import whole_records
from bagua_agent.large_jobs.kept_records import KeptRecords
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import stored
from bagua_agent.large_jobs.whole_records import WholeRecords
from bagua_contract.records import Generation, GenerationKind, Placement

KEYS = JobKeys("job")
LIMITS = Limits(whole_record_members=1)
RECORD = Generation(
    4,
    3,
    GenerationKind.FAILOVER,
    tuple(Placement(f"n{i}.0.a", f"n{i}", f"n{i}", 0, i, i, 0, "h:1", 1, 1, True) for i in range(4)),
    "nonce",
)


@pytest.fixture
def etcd() -> Iterator[EmbeddedEtcd]:
    server = EmbeddedEtcd.start()
    yield server
    server.stop()


def with_record(etcd: EmbeddedEtcd) -> Store:
    store = Store(StoreConfig((parse_endpoint(etcd.endpoint),), request_timeout_s=1.0))
    form = stored(RECORD, KEYS, LIMITS, {})
    for part in form.parts:
        store.put(part.key, part.value)
    store.put(KEYS.generation, form.value)
    return store


def subscribed(store: Store, inbox: queue.SimpleQueue[object]) -> JobSubscription:
    records = WholeRecords(store, KEYS, make_identity("job"), "n3", "127.0.0.1:1", KeptRecords(), LIMITS)
    return JobSubscription(store, KEYS, "n3", records, LIMITS, inbox, hosts_store=False, nodes=2)


def test_what_stands_is_told_with_the_whole_record(etcd: EmbeddedEtcd) -> None:
    store, inbox = with_record(etcd), queue.SimpleQueue[object]()
    seen = subscribed(store, inbox)
    try:
        seen.start()
        first = inbox.get(timeout=1.0)
        assert isinstance(first, StoreChanged)
        assert [(c.key, c.value) for c in first.changes] == [(KEYS.generation, RECORD.encode())]
        state = seen.state()
        assert state is not None and state[KEYS.generation].value == RECORD.encode()
    finally:
        seen.stop()
        store.close()


def test_an_etcd_that_goes_away_meanwhile_ends_the_start(
    etcd: EmbeddedEtcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscription, "START_S", 0.5)
    store, inbox = with_record(etcd), queue.SimpleQueue[object]()
    read = whole_records.packed_parts

    def gone(*arguments: object) -> bytes | None:
        etcd.stop()
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(whole_records, "packed_parts", gone)
    seen = subscribed(store, inbox)
    with pytest.raises(StoreUnavailable, match="record of generation 4"):
        seen.start()
    assert inbox.empty() or not isinstance(inbox.get(), StoreChanged)
    store.close()
