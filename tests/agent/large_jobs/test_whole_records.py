"""A head is replaced by its record before an agent acts on it: from a keeper, else from the store; with a real etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.etcd.client import KeyValue, Store
from bagua_agent.etcd.connection import StoreConfig
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.new_identity import make_identity
from bagua_agent.large_jobs import whole_records
from bagua_agent.large_jobs.kept_records import KeptRecords
from bagua_agent.large_jobs.limits import Limits
from bagua_agent.large_jobs.record_parts import StoredRecord, stored
from bagua_agent.large_jobs.whole_records import WholeRecords
from bagua_agent.rpc.control_server import ControlServer
from bagua_contract.records import Generation, GenerationKind, Placement
from tests.lab.wait import eventually

KEYS = JobKeys("job")
JOB = make_identity("job")
LIMITS = Limits(whole_record_members=1, nodes_of_a_keeper=2)
RECORD = Generation(
    4,
    3,
    GenerationKind.FAILOVER,
    tuple(Placement(f"n{i}.0.a", f"n{i}", f"n{i}", 0, i, i, 0, "h:1", 1, 1, True) for i in range(4)),
    "nonce",
)


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    made = Store(StoreConfig((parse_endpoint(etcd.endpoint),)))
    yield made
    made.delete_prefix("/bagua/")
    made.close()


@pytest.fixture
def keeper() -> Iterator[tuple[ControlServer, KeptRecords]]:
    kept = KeptRecords()
    server = ControlServer("127.0.0.1", JOB, "n0", lambda: [], kept.get)
    yield server, kept
    server.stop()


def reader(store: Store, own_address: str = "127.0.0.1:1") -> WholeRecords:
    return WholeRecords(store, KEYS, JOB, "n3", own_address, KeptRecords(), LIMITS)


def written(store: Store, keeper_address: str, parts: bool = True) -> tuple[StoredRecord, Change]:
    form = stored(RECORD, KEYS, LIMITS, {"n0": keeper_address})
    for part in form.parts if parts else ():
        store.put(part.key, part.value)
    return form, Change(KEYS.generation, form.value, 9, 2)


def test_from_a_keeper_without_asking_the_store(
    store: Store, keeper: tuple[ControlServer, KeptRecords]
) -> None:
    server, kept = keeper
    form, change = written(store, server.address, parts=False)
    kept.keep(form.packed)
    records = reader(store)
    (told,) = records.whole((change,))
    assert told.value is not None and Generation.decode(told.value) == RECORD
    assert (told.mod_revision, told.create_revision) == (9, 2)
    assert records.keepers == (server.address,)


def test_a_keeper_that_hears_of_it_later_is_waited_for(
    store: Store, keeper: tuple[ControlServer, KeptRecords]
) -> None:
    server, kept = keeper
    form, change = written(store, server.address, parts=False)
    asked = threading.Event()
    server._kept_record = lambda sha256: (asked.set(), kept.get(sha256))[1]
    told: list[tuple[Change, ...]] = []
    thread = threading.Thread(target=lambda: told.append(reader(store).whole((change,))))
    thread.start()
    assert asked.wait(5.0)
    kept.keep(form.packed)
    thread.join(5.0)
    assert told and told[0][0].value == RECORD.encode()


def test_a_keeper_without_the_record_is_asked_once_before_the_next(store: Store) -> None:
    asked: list[str] = []
    kept = KeptRecords()
    servers = [
        ControlServer("127.0.0.1", JOB, "n0", lambda: [], lambda sha256: (asked.append("0"), None)[1]),
        ControlServer(
            "127.0.0.1", JOB, "n2", lambda: [], lambda sha256: (asked.append("2"), kept.get(sha256))[1]
        ),
    ]
    try:
        form = stored(RECORD, KEYS, LIMITS, {f"n{2 * i}": server.address for i, server in enumerate(servers)})
        kept.keep(form.packed)
        records = reader(store)
        records._turn = 0
        (told,) = records.whole((Change(KEYS.generation, form.value, 9, 2),))
        assert told.value == RECORD.encode() and asked == ["0", "2"]
    finally:
        for server in servers:
            server.stop()


@pytest.mark.parametrize("lies", [False, True])
def test_from_the_store_where_the_keeper_is_gone_or_lies(
    store: Store,
    keeper: tuple[ControlServer, KeptRecords],
    lies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(whole_records, "KEEPER_S", 0.2)
    server, _ = keeper
    _, change = written(store, server.address)
    if lies:
        server._kept_record = lambda sha256: b"forged"
    else:
        server.stop()
    (told,) = reader(store).whole((change,))
    assert told.value == RECORD.encode()


def test_a_keeper_of_another_job_is_not_heard(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_records, "KEEPER_S", 0.2)
    asked: list[bytes] = []
    stranger = ControlServer(
        "127.0.0.1", make_identity("job"), "n0", lambda: [], lambda sha256: (asked.append(sha256), b"")[1]
    )
    try:
        _, change = written(store, stranger.address)
        (told,) = reader(store).whole((change,))
        assert told.value == RECORD.encode() and asked == []
    finally:
        stranger.stop()


def test_a_keeper_reads_from_the_store_and_hands_on(store: Store) -> None:
    kept = KeptRecords()
    server = ControlServer("127.0.0.1", JOB, "n0", lambda: [], kept.get)
    try:
        form, change = written(store, server.address)
        records = WholeRecords(store, KEYS, JOB, "n0", server.address, kept, LIMITS)
        assert records.whole((change,))[0].value == RECORD.encode()
        for part in form.parts:
            store.delete(part.key)
        assert reader(store).whole((change,))[0].value == RECORD.encode(), "the keeper still has it"
    finally:
        server.stop()


def test_one_that_was_replaced_meanwhile_is_left_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_records, "KEEPER_S", 0.0)
    _, change = written(store, "127.0.0.1:1", parts=False)
    other = Change(KEYS.desired, b"x", 10, 10)
    assert reader(store).whole((change, other)) == (other,)


def test_the_wait_ends_with_the_agent(store: Store, etcd: EmbeddedEtcd) -> None:
    away = Store(StoreConfig((parse_endpoint("127.0.0.1:1"),), request_timeout_s=0.1, attempt_timeout_s=0.1))
    form = stored(RECORD, KEYS, LIMITS, {})
    records = WholeRecords(away, KEYS, JOB, "n3", "127.0.0.1:2", KeptRecords(), LIMITS)
    told: list[tuple[Change, ...]] = []
    change = Change(KEYS.generation, form.value, 9, 2)
    thread = threading.Thread(target=lambda: told.append(records.whole((change,))))
    thread.start()
    records.stop()
    eventually(lambda: told == [()], 5.0, "the wait ends")
    thread.join(5.0)
    away.close()


def test_a_head_that_is_still_being_read_is_not_taken_for_rubbish(store: Store) -> None:
    """lost_store/ overwrites a value that can't be read."""
    form, change = written(store, "127.0.0.1:1")
    records = reader(store, own_address="127.0.0.1:1")
    stands = KeyValue(KEYS.generation, form.value, 2, 9)
    assert records.whole_state({KEYS.generation: stands}) is None
    records.whole((change,))
    known = records.whole_state({KEYS.generation: stands})
    assert known is not None and known[KEYS.generation].value == RECORD.encode()
    newer = KeyValue(KEYS.generation, form.value, 2, 10)
    assert records.whole_state({KEYS.generation: newer}) is None


def test_a_record_whose_parts_are_gone_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that an agent that remembers it puts it again."""
    monkeypatch.setattr(whole_records, "KEEPER_S", 0.0)
    form, change = written(store, "127.0.0.1:1", parts=False)
    records = reader(store)
    records.whole((change,))
    assert records.whole_state({KEYS.generation: KeyValue(KEYS.generation, form.value, 2, 9)}) == {}


def test_a_joining_agent_does_not_wait_for_a_store_that_went_away() -> None:
    away = Store(StoreConfig((parse_endpoint("127.0.0.1:1"),), request_timeout_s=0.1, attempt_timeout_s=0.1))
    form = stored(RECORD, KEYS, LIMITS, {})
    records = WholeRecords(away, KEYS, JOB, "n3", "127.0.0.1:2", KeptRecords(), LIMITS)
    with pytest.raises(StoreUnavailable, match="record of generation 4"):
        records.whole((Change(KEYS.generation, form.value, 9, 2),), within_s=0.3)
    away.close()
