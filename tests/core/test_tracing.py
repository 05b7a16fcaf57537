"""A worker's recorder of spans: when it records, what it sends, and what it costs to leave it out."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bagua_contract import trace_pb2
from bagua_core import tracing
from bagua_core.tracing import STEP


class Sent:
    """What the recorder sent, with names and tracks put together again."""

    def __init__(self) -> None:
        self.messages: list[trace_pb2.Spans] = []

    def take(self, message: trace_pb2.Spans) -> None:
        self.messages.append(message)

    @property
    def spans(self) -> list[tuple[str, str, int, int, int]]:
        names = [n for m in self.messages for n in m.new_names]
        tracks = [t for m in self.messages for t in m.new_tracks]
        return [
            (names[name], tracks[track], m.base_ns + begin_ns, duration_ns, value)
            for m in self.messages
            for name, track, begin_ns, duration_ns, value in zip(
                m.names, m.tracks, m.begins_ns, m.durations_ns, m.values, strict=True
            )
        ]


@pytest.fixture
def sent() -> Iterator[Sent]:
    yield Sent()
    tracing.active = tracing._current = tracing._position = None


def order(number: int = 1, steps: int = 2, most_spans: int = 1000) -> trace_pb2.TraceOrder:
    return trace_pb2.TraceOrder(number=number, steps=steps, most_spans=most_spans)


def test_nothing_is_recorded_before_an_order_and_its_first_lap(sent: Sent) -> None:
    tracing.lap(STEP, 0)
    assert tracing.active is None
    tracing.take(order(), sent.take)
    assert tracing.active is None, "a step is whole in a trace, or not in it"
    with tracing.span("forward"):
        tracing.lap(STEP, 1)
    assert tracing.active is not None
    tracing.active.flush(False)
    assert sent.spans == [], "the span began before the record"


def test_laps_follow_each_other_without_a_gap_and_end_with_the_last_step(sent: Sent) -> None:
    tracing.take(order(steps=2), sent.take)
    tracing.lap(STEP, 4)
    for step in (5, 6):
        with tracing.span("forward"):
            pass
        tracing.lap(STEP, step)
    assert tracing.active is None
    assert [m.done for m in sent.messages][-1] and not any(m.done for m in sent.messages[:-1])
    laps = [s for s in sent.spans if s[0] == STEP]
    assert [lap[4] for lap in laps] == [5, 6]
    assert laps[0][2] + laps[0][3] == laps[1][2]
    forwards = [s for s in sent.spans if s[0] == "forward"]
    for lap, (_, track, begin_ns, duration_ns, _) in zip(laps, forwards, strict=True):
        assert track == tracing.SCRIPT
        assert lap[2] <= begin_ns and begin_ns + duration_ns <= lap[2] + lap[3]


def test_a_step_that_was_rolled_back_is_none_of_the_ordered_steps(sent: Sent) -> None:
    tracing.take(order(steps=1), sent.take)
    tracing.lap(STEP, 1)
    tracing.lap(tracing.ROLLED_BACK, 2)
    assert tracing.active is not None
    tracing.lap(STEP, 2)
    assert tracing.active is None


def test_what_has_no_room_is_counted(sent: Sent) -> None:
    tracing.take(order(steps=1, most_spans=10), sent.take)
    tracing.lap(STEP, 1)
    for _ in range(15):
        with tracing.span("load"):
            pass
    tracing.lap(STEP, 2)
    assert len(sent.spans) == 10
    assert sent.messages[-1].left_out == 6, "five loads, and the step itself"


def test_a_large_record_is_sent_in_messages_that_a_session_takes(sent: Sent) -> None:
    tracing.take(order(steps=1, most_spans=9000), sent.take)
    tracing.lap(STEP, 1)
    for _ in range(8500):
        with tracing.span("load"):
            pass
    tracing.lap(STEP, 2)
    assert len(sent.spans) == 8501
    assert len(sent.messages) >= 3 and max(m.ByteSize() for m in sent.messages) < 100_000
    assert [m.done for m in sent.messages][-2:] == [False, True]


def test_other_threads_have_tracks_of_their_own_and_operations_one_of_theirs(sent: Sent) -> None:
    tracing.take(order(steps=1), sent.take)
    tracing.lap(STEP, 1)

    def copy() -> None:
        with tracing.span("copy of the state"):
            pass

    thread = threading.Thread(target=copy, name="bagua-heal")
    thread.start()
    thread.join()
    with tracing.span("bucket", 3, tracing.COLLECTIVES):
        pass
    tracing.lap(STEP, 2)
    assert {(name, track, value) for name, track, _, _, value in sent.spans} == {
        ("copy of the state", "bagua-heal", -1),
        ("bucket", tracing.COLLECTIVES, 3),
        (STEP, tracing.SCRIPT, 2),
    }


def test_an_end_sends_what_there_is_and_later_spans_go_nowhere(sent: Sent) -> None:
    tracing.take(order(), sent.take)
    tracing.lap(STEP, 1)
    recorder = tracing.active
    assert recorder is not None
    with tracing.span("load"):
        pass
    tracing.take(trace_pb2.TraceOrder(number=7), sent.take)
    assert tracing.active is recorder, "the end of another trace"
    tracing.take(trace_pb2.TraceOrder(number=1), sent.take)
    assert tracing.active is None and sent.messages[-1].done
    recorder.span("late", recorder._lap_ns)
    recorder.flush(True)
    assert [s[0] for s in sent.spans] == ["load"]


def test_the_same_order_twice_goes_on_and_another_begins_anew(sent: Sent) -> None:
    tracing.take(order(1), sent.take)
    tracing.lap(STEP, 1)
    first = tracing.active
    tracing.take(order(1), sent.take)
    assert tracing.active is first
    tracing.take(order(2), sent.take)
    assert tracing.active is None
    tracing.lap(STEP, 2)
    assert tracing.active is not None and tracing.active.number == 2


def test_positions_are_those_before_the_record_and_within_it(sent: Sent) -> None:
    tracing.moved(3, 1, 4, "planned", "two nodes joined", 10)
    tracing.take(order(), sent.take)
    tracing.lap(STEP, 10)
    tracing.moved(4, 0, 2, "failover", "a node was lost", 11)
    recorder = tracing.active
    assert recorder is not None
    recorder.flush(True)
    positions = [p for m in sent.messages for p in m.positions]
    assert [(p.generation, p.global_rank, p.world_size, p.kind) for p in positions] == [
        (3, 1, 4, "planned"),
        (4, 0, 2, "failover"),
    ]
