"""Checks a trace against the Trace Event Format and the rules by which Perfetto's importer takes its events.

The importer turns microseconds into nanoseconds by rounding; earlier versions truncated. On a track it keeps a
stack of spans; one that begins within the open span and ends behind it is dropped. Source: the trace processor's
json_trace_tokenizer.cc, json_utils.cc and slice_tracker.cc.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

Event = dict[str, Any]


def truncated(value_us: float) -> int:
    return int(value_us * 1000.0)


def rounded(value_us: float) -> int:
    return math.floor(value_us * 1000.0 + 0.5)


def check_format(content: Event) -> None:
    events: list[Event] = content["traceEvents"]
    for event in events:
        assert event["ph"] in "MXi" and isinstance(event["name"], str) and event["name"], event
        assert all(isinstance(event[field], int) and event[field] >= 0 for field in ("pid", "tid")), event
        times = [event[field] for field in {"M": (), "i": ("ts",), "X": ("ts", "dur")}[event["ph"]]]
        assert all(isinstance(t, int | float) and math.isfinite(t) and t >= 0 for t in times), event
        assert event["ph"] != "i" or event["s"] == "t", event
    check_names(events)
    for to_ns in (truncated, rounded):
        assert dropped(events, to_ns) == [], to_ns.__name__


def check_names(events: list[Event]) -> None:
    """Each process and each track has one name, and processes of one name do not exist."""
    names = [e for e in events if e["name"] in ("process_name", "thread_name")]
    assert all(e["ph"] == "M" and e["args"]["name"] for e in names)
    processes = Counter(e["pid"] for e in names if e["name"] == "process_name")
    tracks = Counter((e["pid"], e["tid"]) for e in names if e["name"] == "thread_name")
    assert set(processes.values()) | set(tracks.values()) <= {1}
    assert {e["pid"] for e in events} == processes.keys()
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"} <= tracks.keys()
    titles = Counter(e["args"]["name"] for e in names if e["name"] == "process_name")
    assert set(titles.values()) <= {1}, titles


def dropped(events: list[Event], to_ns: Callable[[float], int]) -> list[Event]:
    """What Perfetto drops because it overlaps another span of its track."""
    tracks: dict[tuple[int, int], list[tuple[int, int, Event]]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            span = to_ns(event["ts"]), to_ns(event.get("dur", 0.0)), event
            tracks[event["pid"], event["tid"]].append(span)
    found = []
    for spans in tracks.values():
        stack: list[tuple[int, int]] = []  # end and duration of the open spans
        for begin, duration, event in sorted(spans, key=lambda span: span[0]):  # stable, as the importer's
            while stack and (stack[-1][0] < begin or (stack[-1][0] == begin and (stack[-1][1] or duration))):
                stack.pop()
            if any(begin < end < begin + duration for end, _ in stack):
                found.append(event)
            else:
                stack.append((begin + duration, duration))
    return found
