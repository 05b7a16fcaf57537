"""The agent's part in a trace: one call at a time, orders to its workers, and spans on their way back."""

from __future__ import annotations

import threading

import pytest

from bagua_agent.rpc import trace_relay
from bagua_agent.rpc.trace_relay import TraceBusy, TraceRelay
from bagua_contract import session_pb2, trace_pb2

WITHIN_S = 20.0


class Workers:
    def __init__(self, *worker_ids: str) -> None:
        self.worker_ids = list(worker_ids)
        self.told: list[tuple[str, trace_pb2.TraceOrder]] = []

    def tell(self, order: trace_pb2.TraceOrder, worker_ids: list[str] | None) -> list[str]:
        told = [w for w in self.worker_ids if worker_ids is None or w in worker_ids]
        self.told += [(worker_id, order) for worker_id in told]
        return told


def request(asker: str = "me", within_s: float = WITHIN_S, steps: int = 3) -> trace_pb2.TraceRequest:
    return trace_pb2.TraceRequest(steps=steps, within_s=within_s, asker=asker, most_spans=500)


def said(number: int, names: int = 1) -> session_pb2.WorkerMessage:
    return session_pb2.WorkerMessage(spans=trace_pb2.Spans(number=number, new_names=["x" * 100] * names))


HELLO = session_pb2.WorkerMessage(hello=session_pb2.Hello(worker_id="late"))


def test_workers_get_one_order_and_its_end() -> None:
    workers = Workers("a", "b")
    relay = TraceRelay(workers.tell)
    trace = relay.begin(request())
    assert trace.workers == ["a", "b"]
    assert [(w, o.steps, o.most_spans) for w, o in workers.told] == [("a", 3, 500), ("b", 3, 500)]
    relay.end(trace)
    relay.end(trace)
    assert [(w, o.number == trace.order.number, o.steps) for w, o in workers.told[2:]] == [
        ("a", True, 0),
        ("b", True, 0),
    ]


def test_a_second_call_is_refused_by_the_first_ones_name_until_that_ends() -> None:
    relay = TraceRelay(Workers("a").tell)
    first = relay.begin(request("ada@host (process 7)"))
    with pytest.raises(TraceBusy, match=r"ada@host \(process 7\) has been tracing it for 0 s"):
        relay.begin(request())
    relay.end(first)
    relay.end(relay.begin(request()))


def test_spans_reach_the_call_and_nothing_else_does() -> None:
    workers = Workers("a")
    relay = TraceRelay(workers.tell)
    assert not relay.heard("a", session_pb2.WorkerMessage(ready=session_pb2.Ready()))
    assert relay.heard("a", said(5)), "of a trace that has ended: no concern of the agent's"
    trace = relay.begin(request())
    workers.worker_ids.append("late")
    assert not relay.heard("late", HELLO), "the agent greets it"
    assert workers.told[-1] == ("late", trace.order)
    assert relay.heard("a", said(trace.order.number)) and relay.heard("a", said(trace.order.number + 1))
    relay.gone("a")
    trace.end()
    replies = list(trace.replies())
    assert [reply.WhichOneof("kind") for reply in replies] == ["appeared", "spans", "ended"]
    assert (replies[0].appeared.worker_id, replies[1].spans.worker_id) == ("late", "a")


def test_what_a_slow_caller_does_not_read_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_relay, "MOST_WAITING_BYTES", 50_000)
    relay = TraceRelay(Workers("a").tell)
    trace = relay.begin(request())
    for _ in range(20):
        relay.heard("a", said(trace.order.number, names=100))
    trace.end()
    replies = list(trace.replies())
    kept = [r for r in replies if r.HasField("spans")]
    assert sum(r.ByteSize() for r in kept) <= 50_000
    assert replies[-1].left_out == (20 - len(kept)) * kept[0].ByteSize() > 0


def test_a_trace_ends_when_its_time_is_over() -> None:
    relay = TraceRelay(Workers("a").tell)
    trace = relay.begin(request(within_s=0.05))
    found: list[trace_pb2.TraceReply] = []
    thread = threading.Thread(target=lambda: found.extend(trace.replies()))
    thread.start()
    thread.join(WITHIN_S)
    assert not thread.is_alive() and found == []


@pytest.mark.parametrize(("asked", "ordered"), [(0, 1), (7, 7), (10**9, trace_relay.MOST_STEPS)])
def test_no_caller_orders_without_bound(asked: int, ordered: int) -> None:
    trace = TraceRelay(Workers().tell).begin(request(steps=asked))
    assert trace.order.steps == ordered
