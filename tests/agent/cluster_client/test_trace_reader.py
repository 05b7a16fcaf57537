"""Reading a trace from real agents' servers and a real etcd, whose workers are played: refusals, losses, bounds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.cluster_client import trace_reader
from bagua_agent.cluster_client.job_trace import JobTrace
from bagua_agent.cluster_client.trace_reader import TraceReader
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.keys import JobKeys
from bagua_agent.etcd.server.embedded import EmbeddedEtcd
from bagua_agent.job.new_identity import make_identity
from bagua_agent.rpc.control_server import ControlServer
from bagua_agent.rpc.trace_relay import TraceRelay
from bagua_contract import membership_pb2 as pb
from bagua_contract import session_pb2, trace_pb2

JOB = "demo"
KEYS = JobKeys(JOB)
IDENTITY = make_identity(JOB)
DEADLINE_S = 20.0


class Node:
    """An agent's server with workers that answer each order at once. silent: they record nothing."""

    def __init__(self, store: Store, name: str, *, silent: bool = False, restarts: bool = False) -> None:
        self.name, self.worker_id, self._silent = name, f"{name}.0.w", silent
        self.orders: list[trace_pb2.TraceOrder] = []
        self.ended = threading.Event()
        self.relay = TraceRelay(self._tell)
        self.server = ControlServer(
            "127.0.0.1",
            IDENTITY,
            name,
            lambda: [],
            traces=self.relay,
            node_name=name,
            restarts=lambda: restarts,
        )
        agent = pb.Agent(agent_id=name, node_name=name, control_address=self.server.address)
        store.put(KEYS.agent(name), agent.SerializeToString())

    def _tell(self, order: trace_pb2.TraceOrder, worker_ids: list[str] | None) -> list[str]:
        self.orders.append(order)
        if not order.steps:
            self.ended.set()
        elif not self._silent:
            self.say(order, done=True)
        return [self.worker_id]

    def say(self, order: trace_pb2.TraceOrder, *, done: bool) -> None:
        spans = trace_pb2.Spans(
            number=order.number, new_names=["step"], new_tracks=["script"], names=[0], tracks=[0],
            base_ns=time.monotonic_ns(), begins_ns=[0], durations_ns=[5], values=[1], done=done,
        )  # fmt: skip
        self.relay.heard(self.worker_id, session_pb2.WorkerMessage(spans=spans))


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[Store]:
    store = Store(store_config([etcd.endpoint], StoreCredentials()))
    store.connect(DEADLINE_S)
    store.put(KEYS.spec, pb.JobSpec().SerializeToString())
    store.put(KEYS.identity, IDENTITY.encode())
    yield store
    for keys in KEYS.ranges:
        store.delete_range(keys)
    store.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def node(store: Store) -> Iterator[MakeNode]:
    made: list[Node] = []

    def make(name: str, **keywords: bool) -> Node:
        made.append(Node(store, name, **keywords))
        return made[-1]

    yield make
    for each in made:
        each.server.stop()


def read(store: Store, within_s: float = DEADLINE_S) -> JobTrace:
    reader = TraceReader(store, JOB, 3, within_s, "me", lambda text: None)
    try:
        return reader.collect()
    finally:
        reader.close()


def test_all_nodes_are_read_and_let_go(store: Store, node: MakeNode) -> None:
    nodes = [node("b"), node("a")]
    found = read(store)
    assert sorted(w.node_name for w in found.workers.values() if w.spans) == ["a", "b"]
    assert found.remarks == []
    for clock in found.clocks.values():
        assert clock.after is not None
        for sample in (clock.before, clock.after):
            assert abs(sample.offset_ns) <= sample.error_ns, "it is the same clock"
    for each in nodes:
        assert each.ended.wait(DEADLINE_S), "the agent ends the trace with the call"
        assert [order.steps for order in each.orders] == [3, 0]


def test_a_second_reader_is_refused_and_leaves_the_first_alone(store: Store, node: MakeNode) -> None:
    first, second = node("a", silent=True), node("b")
    held = first.relay.begin(trace_pb2.TraceRequest(steps=1, within_s=DEADLINE_S, asker="ada@host"))
    with pytest.raises(UserError, match=r"is being traced already: on node a ada@host has been tracing it"):
        read(store)
    assert second.orders == [], "agents are asked in one order"
    first.relay.end(held)


def test_a_node_lost_meanwhile_keeps_what_it_sent(store: Store, node: MakeNode) -> None:
    node("a")
    lost = node("b", silent=True)
    reader = TraceReader(store, JOB, 3, DEADLINE_S, "me", lambda text: None)
    found: list[JobTrace] = []
    thread = threading.Thread(target=lambda: found.append(reader.collect()))
    thread.start()
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not lost.orders and time.monotonic() < deadline_s:
            thread.join(0.01)
        lost.say(lost.orders[0], done=False)
        lost.server.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    finally:
        reader.close()
    [trace] = found
    worker = trace.workers[lost.worker_id]
    assert worker.ended and len(worker.spans) == 1
    assert any("worker b.0.w of node b ended meanwhile" in remark for remark in trace.remarks)


def test_a_node_that_falls_silent_is_over_once_the_job_has_removed_its_key(
    store: Store, node: MakeNode
) -> None:
    node("a")
    silent = node("b", silent=True)
    reader = TraceReader(store, JOB, 3, DEADLINE_S, "me", lambda text: None)
    found: list[JobTrace] = []
    thread = threading.Thread(target=lambda: found.append(reader.collect()))
    thread.start()
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while not silent.orders and time.monotonic() < deadline_s:
            thread.join(0.01)
        began_s = time.monotonic()
        store.delete(KEYS.agent("b"))  # its end of the stream stays as it is, as that of a host without power
        thread.join(DEADLINE_S)
    finally:
        reader.close()
    assert not thread.is_alive() and time.monotonic() - began_s < DEADLINE_S / 2
    assert "node b was lost during the trace" in found[0].remarks
    assert found[0].workers["a.0.w"].done


def test_a_worker_that_reaches_no_boundary_is_named_when_the_time_is_over(
    store: Store, node: MakeNode
) -> None:
    node("a")
    node("b", silent=True)
    found = read(store, within_s=1.0)
    assert found.remarks == ["worker b.0.w of node b is missing: it reached no step boundary in time"]
    assert found.workers["a.0.w"].spans


def test_restart_mode_has_no_steps(store: Store, node: MakeNode) -> None:
    asked = node("a", restarts=True)
    with pytest.raises(UserError, match="is in restart mode"):
        read(store)
    assert asked.ended.wait(DEADLINE_S)


def test_a_silent_agent_is_named_and_the_others_are_read(
    store: Store, node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_reader, "CALL_TIMEOUT_S", 3.0)  # of a busy machine, too
    node("a")
    for name, address in (("b", "127.0.0.1:9"), ("c", "nowhere:1")):
        agent = pb.Agent(agent_id=name, node_name=name, control_address=address)
        store.put(KEYS.agent(name), agent.SerializeToString())
    found = read(store)
    assert found.remarks == [
        "node b is missing: its agent at 127.0.0.1:9 does not answer",
        "node c is missing: 'nowhere:1' is no address",
    ]
    assert found.workers["a.0.w"].done


def test_a_job_that_cannot_be_traced_says_why(store: Store, node: MakeNode) -> None:
    with pytest.raises(UserError, match="no agent of job 'demo' answers here"):
        read(store)
    with pytest.raises(UserError, match="no job 'other' in this etcd"):
        TraceReader(store, "other", 3, 1.0, "me", lambda text: None)
    store.put(KEYS.identity, b"odd")
    with pytest.raises(UserError, match="the key pair of job 'demo' in etcd can't be read"):
        read(store)
    store.put(KEYS.result, pb.Result().SerializeToString())
    with pytest.raises(UserError, match="has ended"):
        read(store)
