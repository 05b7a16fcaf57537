"""Writes a trace of a job as Chrome's JSON trace events, which Perfetto (ui.perfetto.dev) opens. Pure.

One process per worker, one track per thread, all on the reader's time axis. On a track spans nest or follow each other,
as the format demands: what overlaps on a track of operations goes to further tracks of the same name.
Source of the format: "Trace Event Format", Google, sections on complete, instant and metadata events. Perfetto drops a
span that ends behind the one around it, by a nanosecond too, and its versions round or truncate microseconds.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from bagua_agent.cluster_client.job_trace import NO_VALUE, HostClock, JobTrace, Span, WorkerTrace

SCRIPT = "script"
JOB_PROCESS = 0
STEPS = ("step", "step rolled back", "round not averaged")
OWN_CODE = "script's own code"
LEAST_OWN_NS = 10_000  # shorter ones are the time between two calls
_VALUE_NAMES = {"bucket": "bucket", **dict.fromkeys(STEPS, "step")}


def chrome_trace(trace: JobTrace) -> dict[str, Any]:
    """Returns the whole file's content. Its times are in microseconds since the first span."""
    workers = sorted(
        (w for w in trace.workers.values() if w.spans and w.agent_id in trace.clocks),
        key=lambda w: (w.global_rank is None, w.global_rank or 0, w.worker_id),
    )
    begins = [trace.clocks[w.agent_id].own_ns(span.begin_ns) for w in workers for span in w.spans]
    origin_ns = min(begins, default=0)
    events: list[dict[str, Any]] = []
    for process, worker in enumerate(workers, JOB_PROCESS + 1):
        events += _worker_events(process, worker, trace.clocks[worker.agent_id], origin_ns)
    events += _generations(trace, workers, origin_ns)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "job": trace.job_id,
            "steps": trace.steps,
            "clock_error_us": {w.node_name: trace.clocks[w.agent_id].error_ns / 1000 for w in workers},
            "missing": trace.remarks,
        },
        "traceEvents": events,
    }


def _worker_events(
    process: int, worker: WorkerTrace, clock: HostClock, origin_ns: int
) -> list[dict[str, Any]]:
    rank = "no rank" if worker.global_rank is None else f"rank {worker.global_rank}"
    events = [
        _name("process_name", process, 0, name=f"{rank} · {worker.node_name} · {worker.worker_id}"),
        _name("process_sort_index", process, 0, sort_index=process),
    ]
    by_track: dict[str, list[Span]] = defaultdict(list)
    for span in worker.spans:
        by_track[span.track].append(span)
    by_track[SCRIPT] += own_code(by_track[SCRIPT])
    thread = 0
    for track in sorted(by_track, key=lambda name: (name != SCRIPT, name)):
        lanes = [by_track[track]] if track == SCRIPT else lanes_of(by_track[track])
        for number, lane in enumerate(lanes):
            thread += 1
            title = track if number == 0 else f"{track} {number + 1}"
            events += [
                _name("thread_name", process, thread, name=title),
                _name("thread_sort_index", process, thread, sort_index=thread),
            ]
            events += [_event(span, process, thread, clock, origin_ns) for span in _outer_first(lane)]
    return events


def own_code(spans: Iterable[Span]) -> list[Span]:
    """Returns the parts of each step, in the script's thread, in which nothing of the runtime was recorded. There the
    script's own code ran, such as its loss. spans: nested or one after the other."""
    found: list[Span] = []
    step: Span | None = None
    at_ns = 0

    def until(end_ns: int) -> None:
        if step is not None and end_ns - at_ns >= LEAST_OWN_NS:
            found.append(Span(OWN_CODE, SCRIPT, at_ns, end_ns - at_ns, NO_VALUE))

    for span in _outer_first(spans):
        if step is not None and span.begin_ns >= _end_ns(step):
            until(_end_ns(step))
            step = None
        if span.name in STEPS:
            step, at_ns = span, span.begin_ns
        elif step is not None and span.begin_ns >= at_ns:
            until(span.begin_ns)
            at_ns = _end_ns(span)
    if step is not None:
        until(_end_ns(step))
    return found


def _end_ns(span: Span) -> int:
    return span.begin_ns + span.duration_ns


def _outer_first(spans: Iterable[Span]) -> list[Span]:
    return sorted(spans, key=lambda s: (s.begin_ns, -s.duration_ns))


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Splits spans into as few groups as it takes so that in each of them no span begins before the last one's end."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin_ns):
        for lane in lanes:
            if _end_ns(lane[-1]) <= span.begin_ns:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _event(span: Span, process: int, thread: int, clock: HostClock, origin_ns: int) -> dict[str, Any]:
    begin_ns = clock.own_ns(span.begin_ns)
    at_us = _microseconds(begin_ns - origin_ns)
    event: dict[str, Any] = {"name": span.name, "cat": span.track, "pid": process, "tid": thread, "ts": at_us}
    if span.duration_ns:
        # by both ends, so that what ends together still does where the clock drifts
        event |= {"ph": "X", "dur": _microseconds(clock.own_ns(_end_ns(span)) - begin_ns)}
    else:
        event |= {"ph": "i", "s": "t"}
    if span.value != NO_VALUE:
        event["name"] = f"{span.name} {span.value}"
        event["args"] = {_VALUE_NAMES.get(span.name, "generation"): span.value}
    return event


def _microseconds(duration_ns: int) -> float:
    """Returns the number from which a reader gets `duration_ns` back, whether it rounds or truncates to nanoseconds."""
    value = duration_ns / 1000
    while int(value * 1000) < duration_ns:
        value = math.nextafter(value, math.inf)
    return value


def _generations(trace: JobTrace, workers: list[WorkerTrace], origin_ns: int) -> list[dict[str, Any]]:
    """Returns the job's own track: each generation from its first worker's entry to the next one's."""
    entries: dict[int, tuple[int, Any]] = {}
    end_ns = origin_ns
    for worker in workers:
        clock = trace.clocks[worker.agent_id]
        end_ns = max([end_ns, *(clock.own_ns(_end_ns(s)) for s in worker.spans)])
        for position in worker.positions:
            at_ns = max(origin_ns, clock.own_ns(position.at_ns))
            known = entries.get(position.generation)
            if known is None or at_ns < known[0]:
                entries[position.generation] = at_ns, position
    events = [
        _name("process_name", JOB_PROCESS, 0, name=f"job {trace.job_id}"),
        _name("process_sort_index", JOB_PROCESS, 0, sort_index=JOB_PROCESS),
        _name("thread_name", JOB_PROCESS, 1, name="generations"),
    ]
    ordered = sorted(entries.items())
    # in the order of the numbers: two clocks may disagree about entries that lie close together
    begins_ns = list(itertools.accumulate((at_ns for _, (at_ns, _) in ordered), max))
    ends_ns = [*begins_ns[1:], max([end_ns, *begins_ns[-1:]])]
    for (number, (_, position)), begin_ns, until_ns in zip(ordered, begins_ns, ends_ns, strict=True):
        events.append(
            {
                "name": f"generation {number}: {position.world_size} workers",
                "cat": "generation",
                "ph": "X",
                "pid": JOB_PROCESS,
                "tid": 1,
                "ts": _microseconds(begin_ns - origin_ns),
                "dur": _microseconds(until_ns - begin_ns),
                "args": {
                    "generation": number,
                    "kind": position.kind,
                    "why": position.reason,
                    "step": position.step,
                    "world_size": position.world_size,
                },
            }
        )
    return events


def _name(kind: str, process: int, thread: int, **arguments: str | int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": arguments}
