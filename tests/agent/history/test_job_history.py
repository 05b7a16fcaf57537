"""Events for people: written once, by whom it concerns, bounded, and read in the order of the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import KeyValue, Store, Transaction
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.mirror import Change
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.history import job_history as history
from bagua_agent.history.history_keeper import MOST_OWED, HistoryKeeper
from bagua_agent.history.history_writer import MOST_WAITING, HistoryWriter
from bagua_agent.history.job_history import EventKind, JobEvent, events_of, ranks_by_node, superfluous
from bagua_contract import membership_pb2 as pb
from bagua_contract.records import Generation, GenerationKind, Placement
from bagua_contract.replica import Replica, ReplicaMember

KEYS = JobKeys("job")
DEADLINE_S = 10.0
FAILURE = pb.Failure(
    worker_id="a.0.w",
    slot=0,
    global_rank=3,
    cause="ValueError: no\nmore",
    log_path="/logs",
    script_failure=True,
)
_SHARDS = tuple(ReplicaMember(f"{node}.0.w", node, node, 0, f"{node}:1") for node in ("a", "b"))
EVERY = [
    history.created("train.py"),
    history.formed(Generation(3, 2, GenerationKind.FAILOVER, (), "nonce", "lost a"), "generation 3, now"),
    history.worker_ended(FAILURE),
    history.worker_ended(pb.Failure(worker_id="b.0.w", global_rank=-1, cause="killed by SIGKILL")),
    history.scaled(17, "2 to 3 nodes are wanted now"),
    history.tuned(18, "settings of steps: flat"),
    history.in_force(3, "generation 3 is in force from step 12", 0.25),
    history.node_joined("a", 8),
    history.node_leaving("a"),
    history.node_lost("a", "host-1", 12),
    history.store_away("a", 1),
    history.store_back("a", 1, 3.21),
    history.keys_lost("a", 1),
    history.replica_written(Replica("r", _SHARDS, "nonce")),
    history.replica_written(Replica("r", _SHARDS, "nonce", over="worker a.0.w is lost")),
    history.agent_failed("host-1", 2, "its agent ended with 2: no such account"),
    history.ended("succeeded", "training is done"),
]


def test_files_are_named_where_the_worker_left_any() -> None:
    texts = [event.text for event in EVERY if event.kind in (EventKind.WORKER_FAILED, EventKind.WORKER_LOST)]
    assert texts[0].endswith("; files in /logs") and texts[1].endswith("in no generation: killed by SIGKILL")


def stored(event: JobEvent, revision: int, node_name: str = "host-0", at_s: float = 1e9) -> KeyValue:
    return KeyValue(KEYS.event(event.name), event.encode(node_name, at_s), revision, revision, 1, 0)


def test_every_kind_is_read_back_in_the_order_of_the_store() -> None:
    values = [stored(event, 100 - i, at_s=1e9 - i) for i, event in enumerate(EVERY)]
    read = events_of(values, KEYS)
    assert [e.name for e in read] == [e.name for e in reversed(EVERY)]
    assert {e.kind for e in read} == set(EventKind)
    formed = next(e for e in read if e.kind is EventKind.GENERATION_FORMED)
    assert (formed.generation, formed.generation_kind, formed.world_size) == (3, "FAILOVER", 0)
    failed = next(e for e in read if e.kind is EventKind.WORKER_FAILED)
    assert failed.worker_id == "a.0.w" and "\n" not in failed.text and "global rank 3" in failed.text
    lost = next(e for e in read if e.kind is EventKind.NODE_LOST)
    assert lost.node_name == "host-1" and formed.node_name == "host-0"
    assert formed.time_unix_s == pytest.approx(1e9 - 1)


def test_an_event_that_was_written_again_is_where_it_happened_last() -> None:
    failed = history.agent_failed("host-1", 1, "its agent ended with 1")
    again = KeyValue(KEYS.event(failed.name), failed.encode("host-1", 2e9), 2, 9, 2, 0)
    values = [stored(EVERY[0], 1), again, stored(EVERY[4], 5)]
    assert [e.name for e in events_of(values, KEYS)] == [EVERY[0].name, EVERY[4].name, failed.name]


def test_a_generation_lists_the_ranks_of_its_first_nodes() -> None:
    places = [(0, "h1"), (1, "h1"), (2, "h2"), (3, "h3"), (4, "h3"), (5, "h3"), (6, "h1")]
    members = tuple(Placement(f"w{r}", f"a-{n}", n, 0, r, 0, 0, "", 0, 0, True) for r, n in places)
    generation = Generation(4, 3, GenerationKind.PLANNED, members, "nonce", "")
    assert ranks_by_node(generation, 3) == ("h1: rank 0, 1, 6", "h2: rank 2", "h3: rank 3 to 5")
    assert ranks_by_node(generation, 1) == ("h1: rank 0, 1, 6", "and 2 nodes more")
    [read] = events_of([stored(history.formed(generation, "adds h3"), 1)], KEYS)
    assert read.members == ranks_by_node(generation, 3)


def test_names_tell_events_apart() -> None:
    assert len({event.name for event in EVERY}) == len(EVERY)


@pytest.mark.parametrize(
    "kv",
    [
        KeyValue(KEYS.event("x"), b"\xff\xff", 1, 1, 1, 0),
        KeyValue(KEYS.event("x"), b"", 1, 1, 1, 0),
        KeyValue(KEYS.event("x"), pb.Event(kind=99).SerializeToString(), 1, 1, 1, 0),  # type: ignore[arg-type]
        KeyValue(KEYS.spec, pb.Event(kind=pb.Event.SCALED).SerializeToString(), 1, 1, 1, 0),
        KeyValue(KEYS.events + "a/b", pb.Event(kind=pb.Event.SCALED).SerializeToString(), 1, 1, 1, 0),
    ],
)
def test_what_is_no_event_is_passed_over(kv: KeyValue) -> None:
    assert [e.name for e in events_of([kv, stored(EVERY[0], 2)], KEYS)] == ["created"]


def test_the_oldest_are_superfluous() -> None:
    revisions = {f"k{i}": i for i in range(12)}
    assert superfluous(revisions, kept=10) == ["k0", "k1"]
    assert superfluous(revisions, kept=12) == []


class Recorder:
    def __init__(self) -> None:
        self.written: list[str] = []
        self.removed: list[str] = []

    def write(self, key: str, value: bytes) -> None:
        self.written.append(key.removeprefix(KEYS.events))

    def remove(self, keys: list[str]) -> None:
        self.removed += [key.removeprefix(KEYS.events) for key in keys]

    def flush(self, timeout_s: float) -> bool:
        return True


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def keeper(recorder: Recorder) -> HistoryKeeper:
    return HistoryKeeper(KEYS, "host-0", recorder, lambda: 1e9)


def test_the_leader_alone_writes_what_all_agents_see(keeper: HistoryKeeper, recorder: Recorder) -> None:
    keeper.leader_is("b", leading=False)
    keeper.of_job(EVERY[1])
    keeper.own(EVERY[5])
    keeper.leader_is("a", leading=True)
    keeper.of_job(EVERY[4])
    assert recorder.written == [EVERY[5].name, EVERY[4].name]


def test_events_without_a_leader_are_written_by_the_next_leader(
    keeper: HistoryKeeper, recorder: Recorder
) -> None:
    keeper.leader_is(None, leading=False)
    keeper.of_job(EVERY[7])
    assert recorder.written == []
    keeper.leader_is("a", leading=True)
    assert recorder.written == [EVERY[7].name]
    keeper.leader_is(None, leading=False)
    keeper.of_job(EVERY[1])
    keeper.leader_is("b", leading=False)
    keeper.leader_is("a", leading=True)
    assert recorder.written == [EVERY[7].name], "b has written it"


def test_what_is_owed_is_bounded(keeper: HistoryKeeper, recorder: Recorder) -> None:
    for i in range(3 * MOST_OWED):
        keeper.of_job(history.scaled(i, "more"))
    keeper.leader_is("a", leading=True)
    assert recorder.written == [f"scaled-{i}" for i in range(2 * MOST_OWED, 3 * MOST_OWED)]


def test_the_leader_removes_the_oldest(keeper: HistoryKeeper, recorder: Recorder) -> None:
    changes = tuple(Change(KEYS.event(f"e{i}"), b"x", i, i) for i in range(1, history.KEPT + 3))
    keeper.saw((*changes, Change(KEYS.spec, b"x", 1, 1)))
    assert recorder.removed == []
    keeper.leader_is("a", leading=True)
    assert recorder.removed == ["e1", "e2"]
    keeper.saw((Change(KEYS.event("e3"), None, 5000, 3), Change(KEYS.event("new"), b"x", 5001, 5001)))
    assert recorder.removed == ["e1", "e2"]


def test_an_event_that_was_written_again_is_not_among_the_oldest(
    keeper: HistoryKeeper, recorder: Recorder
) -> None:
    changes = tuple(Change(KEYS.event(f"e{i}"), b"x", i, i) for i in range(1, history.KEPT + 2))
    keeper.saw((*changes, Change(KEYS.event("e1"), b"again", 5000, 1)))
    keeper.leader_is("a", leading=True)
    assert recorder.removed == ["e2"]


def test_an_id_as_long_as_ids_may_be_is_harmless(keeper: HistoryKeeper, recorder: Recorder) -> None:
    keeper.own(history.node_lost("x" * 100, "host", 1))
    assert len(recorder.written) == 1


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    connected = Store(store_config((etcd.endpoint,), StoreCredentials()))
    connected.delete_prefix(KEYS.prefix)
    yield connected
    connected.close()


@pytest.fixture
def writer(store: Store) -> Iterator[HistoryWriter]:
    made = HistoryWriter(store)
    yield made
    made.stop()


def test_events_are_written_once_and_removed(store: Store, writer: HistoryWriter) -> None:
    for event in [*EVERY, *EVERY]:
        writer.write(KEYS.event(event.name), event.encode("host-0", 1e9))
    assert writer.flush(DEADLINE_S)
    read = events_of(store.get_prefix(KEYS.events)[0], KEYS)
    assert [e.name for e in read] == [e.name for e in EVERY]
    writer.remove([KEYS.event(e.name) for e in EVERY[:-1]])
    assert writer.flush(DEADLINE_S)
    assert [e.name for e in events_of(store.get_prefix(KEYS.events)[0], KEYS)] == ["ended"]


class AwayStore:
    """A store that does not answer until `back` is set."""

    def __init__(self) -> None:
        self.back = threading.Event()
        self.asked = threading.Event()
        self.keys: list[str] = []

    def transact(self, compares, puts=(), deletes=(), timeout_s=None):  # type: ignore[no-untyped-def]
        self.asked.set()
        if not self.back.is_set():
            raise StoreUnavailable("away")
        self.keys += [put.key for put in puts]
        return Transaction(True, 1)


def test_an_away_store_delays_no_agent_and_gets_the_newest_later() -> None:
    away = AwayStore()
    writer = HistoryWriter(away)  # type: ignore[arg-type]
    try:
        for i in range(2 * MOST_WAITING):
            writer.write(f"k{i}", b"")
        assert away.asked.wait(DEADLINE_S)
        assert not writer.flush(0.01)
        away.back.set()
        assert writer.flush(DEADLINE_S)
        assert away.keys[-1] == f"k{2 * MOST_WAITING - 1}"
        assert MOST_WAITING <= len(away.keys) <= MOST_WAITING + 2
    finally:
        writer.stop()


def test_it_stops_while_the_store_is_away() -> None:
    away = AwayStore()
    writer = HistoryWriter(away)  # type: ignore[arg-type]
    writer.write("k", b"")
    assert away.asked.wait(DEADLINE_S)
    writer.stop()
    assert not [t for t in threading.enumerate() if t.name == "bagua-history" and t.is_alive()]
