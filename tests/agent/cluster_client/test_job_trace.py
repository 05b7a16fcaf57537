"""Decisions about a job's trace: whose clock, whose spans, when it is whole, and its form as Chrome's JSON."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_agent.cluster_client.chrome_trace import OWN_CODE, chrome_trace, lanes_of, own_code
from bagua_agent.cluster_client.job_trace import (
    HostClock,
    JobTrace,
    Span,
    WorkerTrace,
    best,
    is_complete,
    remarks_of,
    sample_of,
)
from bagua_contract import trace_pb2
from tests.agent.cluster_client.trace_format import check_format, dropped, rounded, truncated


@given(st.integers(-(10**15), 10**15), st.integers(0, 10**7), st.integers(0, 10**7))
def test_a_clock_is_wrong_by_no_more_than_half_a_round_trip(
    ahead_ns: int, there_ns: int, back_ns: int
) -> None:
    sent_ns = 10**16
    sample = sample_of(sent_ns, sent_ns + there_ns + ahead_ns, sent_ns + there_ns + back_ns)
    assert abs(sample.offset_ns - ahead_ns) <= sample.error_ns
    assert sample.error_ns <= (there_ns + back_ns) / 2 + 1


def test_the_shortest_round_trip_counts() -> None:
    samples = [sample_of(0, 500, 100), sample_of(200, 710, 220), sample_of(300, 900, 900)]
    assert best(samples) == samples[1]
    assert best([]) is None


def test_between_two_comparisons_a_clock_drifts_evenly() -> None:
    clock = HostClock(sample_of(1000, 2000, 1000), sample_of(3000, 4200, 3000))
    assert [clock.own_ns(at) for at in (2000, 3100, 4200)] == [1000, 2000, 3000]
    assert clock.own_ns(1500) == 500 and clock.own_ns(4300) == 3100, "outside, the nearest comparison"
    assert HostClock(clock.before).own_ns(4200) == 3200, "the host was lost meanwhile"


def test_one_offset_that_explains_both_comparisons_is_the_clock() -> None:
    clock = HostClock(sample_of(1000, 2010, 1040), sample_of(3000, 4012, 3010))
    assert not clock.drifts and clock.error_ns == 5
    assert clock.own_ns(2010) == 2010 - (4012 - 3005), "the shorter round trip's"
    far = HostClock(sample_of(1000, 2010, 1040), sample_of(3000, 4112, 3010))
    assert far.drifts and far.error_ns == 20


def message(**fields: object) -> trace_pb2.Spans:
    known: dict[str, object] = {
        "new_names": ["step"],
        "new_tracks": ["script"],
        "names": [0],
        "tracks": [0],
        "begins_ns": [5],
        "durations_ns": [10],
        "values": [3],
        "base_ns": 100,
    }
    return trace_pb2.Spans(**{**known, **fields})  # type: ignore[arg-type]


def test_names_are_introduced_once() -> None:
    worker = WorkerTrace("w", "a", "node")
    worker.take(message())
    worker.take(message(new_names=["load"], new_tracks=[], names=[1], begins_ns=[-2], done=True, left_out=4))
    assert worker.spans == [Span("step", "script", 105, 10, 3), Span("load", "script", 98, 10, 3)]
    assert worker.done and worker.left_out == 4


@pytest.mark.parametrize(
    "odd", [{"names": [1]}, {"tracks": [9]}, {"values": []}, {"new_names": ["n"] * 10_001}]
)
def test_what_no_recorder_sends_is_refused(odd: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        WorkerTrace("w", "a", "node").take(message(**odd))


def worker(
    name: str, *, done: bool = False, ended: bool = False, spans: bool = True, left_out: int = 0
) -> WorkerTrace:
    found = WorkerTrace(name, "a", "node", done=done, ended=ended)
    if spans:
        found.take(message(left_out=left_out))
    return found


@pytest.mark.parametrize(
    ("workers", "streams", "complete", "reason"),
    [
        ([worker("a", done=True), worker("b")], 1, False, "1 of 2 workers record"),
        ([worker("a", done=True), worker("b", ended=True)], 1, True, "all steps are recorded"),
        ([worker("a", done=True), worker("b", done=True), worker("late")], 1, True, "all steps are recorded"),
        (
            [worker("a", ended=True), worker("b", ended=True), worker("late")],
            1,
            False,
            "1 of 1 workers record",
        ),
        ([worker("a", ended=True)], 1, False, "there is no worker"),
        ([worker("a")], 0, True, "no agent of the job is left"),
    ],
)
def test_a_trace_is_whole_when_the_workers_of_its_begin_are(
    workers: list[WorkerTrace], streams: int, complete: bool, reason: str
) -> None:
    assert is_complete({"a", "b"}, workers, streams) == (complete, reason)


def test_what_is_missing_is_named() -> None:
    remarks = remarks_of(
        [
            worker("whole", done=True),
            worker("stuck", spans=False),
            worker("killed", ended=True),
            worker("gone", ended=True, spans=False),
            worker("slow"),
            worker("busy", done=True, left_out=7),
        ],
        20,
    )
    assert [remark.removeprefix("worker ") for remark in remarks] == [
        "stuck of node node is missing: it reached no step boundary in time",
        "killed of node node ended meanwhile: its spans of the last moments are missing",
        "gone of node node is missing: it ended",
        "slow of node node has fewer than 20 steps",
        "busy of node node left out 7 spans: ask for fewer steps",
    ]


spans = st.lists(
    st.builds(
        Span, st.just("bucket"), st.just("collectives"), st.integers(0, 100), st.integers(1, 30), st.just(-1)
    ),
    max_size=30,
)


@given(spans)
def test_a_lane_has_one_operation_at_a_time(overlapping: list[Span]) -> None:
    lanes = lanes_of(overlapping)
    assert sorted(s.begin_ns for lane in lanes for s in lane) == sorted(s.begin_ns for s in overlapping)
    for lane in lanes:
        for earlier, later in itertools.pairwise(lane):
            assert earlier.begin_ns + earlier.duration_ns <= later.begin_ns
    most = max(
        (sum(s.begin_ns <= t < s.begin_ns + s.duration_ns for s in overlapping) for t in range(130)),
        default=0,
    )
    assert len(lanes) == most


def test_the_rest_of_a_step_is_the_scripts_own_code() -> None:
    ms = 1_000_000
    step = Span("step", "script", 0, 100 * ms, 1)
    inner = [
        Span("forward", "script", 10 * ms, 20 * ms, -1),
        Span("bucket wait", "script", 15 * ms, 5 * ms, -1),
        Span("commit", "script", 90 * ms, 10 * ms, -1),
    ]
    rest = own_code([step, *inner, Span("switch", "script", 100 * ms, 50 * ms, 2)])
    assert [(s.name, s.begin_ns // ms, s.duration_ns // ms) for s in rest] == [
        (OWN_CODE, 0, 10),
        (OWN_CODE, 30, 60),
    ]


def test_two_hosts_with_different_clocks_share_one_axis() -> None:
    trace = JobTrace("demo", 2, remarks=["node c is missing"])
    for name, ahead_ns, rank in (("a", 10**12, 1), ("b", 10**9, 0)):
        trace.clocks[name] = HostClock(sample_of(0, ahead_ns, 0))
        found = WorkerTrace(f"worker-{name}", name, f"node-{name}")
        found.spans.append(Span("step", "script", ahead_ns + 5_000, 2_000, 7))
        found.spans.append(Span("generation is announced", "bagua-session", ahead_ns + 6_000, 0, 4))
        found.positions.append(
            trace_pb2.Position(
                at_ns=ahead_ns + 5_000 + rank, generation=3, global_rank=rank, world_size=2, kind="planned"
            )
        )
        trace.workers[found.worker_id] = found
    text = json.dumps(chrome_trace(trace))
    events = json.loads(text)["traceEvents"]
    steps = [e for e in events if e["name"] == "step 7"]
    assert [(e["pid"], e["ts"], e["dur"], e["args"]) for e in steps] == [
        (1, 0.0, 2.0, {"step": 7}),
        (2, 0.0, 2.0, {"step": 7}),
    ]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "job demo", 1: "rank 0 · node-b · worker-b", 2: "rank 1 · node-a · worker-a"}
    [generation] = [e for e in events if e.get("cat") == "generation" and e["ph"] == "X"]
    assert generation["name"] == "generation 3: 2 workers"
    assert json.loads(text)["otherData"]["missing"] == ["node c is missing"]


@st.composite
def steps_of_a_script(draw: st.DrawFn) -> list[Span]:
    """Steps one after the other, each with parts that nest in it and may end with it."""
    found, at_ns = [], draw(st.integers(0, 10**9))
    for number in range(draw(st.integers(1, 4))):
        marks = sorted(draw(st.lists(st.integers(0, 200_001), min_size=4, max_size=4)))
        begin, inner, inner_end, end = (at_ns + mark for mark in marks)
        found.append(Span("step", "script", begin, end - begin, number))
        found.append(Span("backward", "script", inner, end - inner, -1))
        found.append(Span("bucket wait", "script", inner, inner_end - inner, -1))
        at_ns = end
    return found


@st.composite
def clocks(draw: st.DrawFn) -> HostClock:
    """Of a host that drifts by up to a thousandth within 10 ms."""
    offset, drift = draw(st.integers(-(10**9), 10**9)), draw(st.integers(-(10**4), 10**4))
    return HostClock(sample_of(0, offset, 0), sample_of(10**7, 10**7 + offset + drift, 10**7))


@given(
    st.lists(st.tuples(steps_of_a_script(), spans, clocks()), min_size=1, max_size=3),
    st.lists(st.integers(0, 10**6), min_size=1, max_size=4),
)
def test_perfetto_takes_every_span(
    workers: list[tuple[list[Span], list[Span], HostClock]], entries_ns: list[int]
) -> None:
    trace = JobTrace("demo", 4)
    for rank, (script, operations, clock) in enumerate(workers):
        trace.clocks[f"agent-{rank}"] = clock
        found = WorkerTrace(f"worker-{rank}", f"agent-{rank}", "node")
        found.spans += [*script, *operations, Span("announced", "bagua-session", script[0].begin_ns, 0, 1)]
        # each worker enters by its own clock, so entries of two workers can be in another order than their numbers
        for number, entry_ns in enumerate(entries_ns):
            if number % len(workers) == rank:
                at_ns = script[0].begin_ns + entry_ns
                found.positions.append(trace_pb2.Position(at_ns=at_ns, generation=number + 1, world_size=1))
        trace.workers[found.worker_id] = found
    check_format(json.loads(json.dumps(chrome_trace(trace))))


def test_a_span_that_ends_a_nanosecond_behind_its_outer_one_is_found() -> None:
    outer = {"name": "step 1", "ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2.0}
    inner = {"name": "commit", "ph": "X", "pid": 1, "tid": 1, "ts": 1.0, "dur": 1.001}
    assert dropped([outer, inner], rounded) == [inner]
    assert dropped([outer, {**inner, "dur": 1.0}], rounded) == []
    assert (truncated(1.001), rounded(1.001)) == (1000, 1001), "1.001 is a little less in binary"
