"""Defines the parts of a trace of a job, and sets the clocks of its hosts against the reader's. Pure.

Each worker's spans carry times of its own host's monotonic clock. A clock is compared by round trips to the agent of
that host: half of the shortest one bounds the error, whatever the way takes in either direction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from bagua_contract import trace_pb2

NO_VALUE = -1
_MOST_NAMES = 10_000  # of one worker


@dataclass(frozen=True, slots=True)
class ClockSample:
    """The result of one round trip. offset_ns: of the host's clock ahead of the reader's, wrong by error_ns at most."""

    host_ns: int
    offset_ns: int
    error_ns: int


def sample_of(sent_ns: int, host_ns: int, received_ns: int) -> ClockSample:
    """Returns the sample of one round trip. sent_ns, received_ns: of the reader's clock, around the moment at which the
    host's was read."""
    middle_ns = (sent_ns + received_ns) // 2
    return ClockSample(host_ns, host_ns - middle_ns, (received_ns - sent_ns + 1) // 2)


@dataclass(frozen=True, slots=True)
class HostClock:
    """A host's clock against the reader's. It is compared before the trace and, if the host still answered, after it.
    If one offset explains both round trips, the shorter one gives it; else the clock is taken to drift evenly in
    between."""

    before: ClockSample
    after: ClockSample | None = None

    @property
    def drifts(self) -> bool:
        first, last = self.before, self.after
        if last is None or last.host_ns <= first.host_ns:
            return False
        return abs(last.offset_ns - first.offset_ns) > first.error_ns + last.error_ns

    @property
    def error_ns(self) -> int:
        errors_ns = [s.error_ns for s in (self.before, self.after) if s is not None]
        return max(errors_ns) if self.drifts else min(errors_ns)

    def own_ns(self, host_ns: int) -> int:
        """Returns `host_ns` on the reader's clock. Of two times the later one is never before the earlier one."""
        first, last = self.before, self.after
        if last is None or not self.drifts:
            sample = first if last is None or first.error_ns <= last.error_ns else last
            return host_ns - sample.offset_ns
        share = min(1.0, max(0.0, (host_ns - first.host_ns) / (last.host_ns - first.host_ns)))
        return host_ns - first.offset_ns - round(share * (last.offset_ns - first.offset_ns))


def best(samples: Iterable[ClockSample]) -> ClockSample | None:
    return min(samples, key=lambda s: s.error_ns, default=None)


@dataclass(frozen=True, slots=True)
class Span:
    """A span of a worker. Times are of the worker's host. duration_ns 0: an instant. value: a step, a generation, a
    bucket; NO_VALUE: none."""

    name: str
    track: str
    begin_ns: int
    duration_ns: int
    value: int


@dataclass(slots=True)
class WorkerTrace:
    """The trace of one worker. left_out: spans that had no room. done: all ordered steps are recorded. ended: its
    session is over."""

    worker_id: str
    agent_id: str
    node_name: str
    spans: list[Span] = field(default_factory=list)
    positions: list[trace_pb2.Position] = field(default_factory=list)
    left_out: int = 0
    done: bool = False
    ended: bool = False
    _names: list[str] = field(default_factory=list)
    _tracks: list[str] = field(default_factory=list)

    def take(self, message: trace_pb2.Spans) -> None:
        """Adds what the worker recorded since its last message. Raises ValueError for what no recorder sends."""
        self._names += message.new_names
        self._tracks += message.new_tracks
        columns = (message.names, message.tracks, message.begins_ns, message.durations_ns, message.values)
        if len({len(column) for column in columns}) != 1:
            raise ValueError("its columns have different lengths")
        if max(len(self._names), len(self._tracks)) > _MOST_NAMES:
            raise ValueError(f"it has more than {_MOST_NAMES} names")
        if max(message.names, default=-1) >= len(self._names) or max(message.tracks, default=-1) >= len(
            self._tracks
        ):
            raise ValueError("it names a span that was not introduced")
        self.spans += [
            Span(self._names[name], self._tracks[track], message.base_ns + begin_ns, duration_ns, value)
            for name, track, begin_ns, duration_ns, value in zip(*columns, strict=True)
        ]
        self.positions += message.positions
        self.left_out = message.left_out
        self.done |= message.done

    @property
    def global_rank(self) -> int | None:
        """The worker's newest global rank; None before the first."""
        return self.positions[-1].global_rank if self.positions else None


@dataclass(slots=True)
class JobTrace:
    """The trace of a job. workers: by id. clocks: by agent id. remarks: what is missing, in words."""

    job_id: str
    steps: int
    workers: dict[str, WorkerTrace] = field(default_factory=dict)
    clocks: dict[str, HostClock] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def clock_error_ns(self) -> int:
        return max((clock.error_ns for clock in self.clocks.values()), default=0)


def is_complete(
    first: Collection[str], workers: Collection[WorkerTrace], open_streams: int
) -> tuple[bool, str]:
    """Tells whether nothing more is worth waiting for, and why. first: workers that got the order at the begin. Those
    that came later are waited for only when all of the first ones are gone."""
    if not open_streams:
        return True, "no agent of the job is left"
    live = [w for w in workers if not w.ended]
    awaited = [w for w in live if w.worker_id in first] or live
    if not awaited:
        return False, "there is no worker"
    waiting = [w for w in awaited if not w.done]
    if waiting:
        return False, f"{len(waiting)} of {len(awaited)} workers record"
    return True, "all steps are recorded"


def remarks_of(workers: Iterable[WorkerTrace], steps: int) -> list[str]:
    """Returns what a reader of the trace must know of workers that are not whole in it."""
    found = []
    for worker in workers:
        name = f"worker {worker.worker_id} of node {worker.node_name}"
        if not worker.spans:
            why = "it ended" if worker.ended else "it reached no step boundary in time"
            found.append(f"{name} is missing: {why}")
        elif worker.ended and not worker.done:
            found.append(f"{name} ended meanwhile: its spans of the last moments are missing")
        elif not worker.done:
            found.append(f"{name} has fewer than {steps} steps")
        if worker.left_out:
            found.append(f"{name} left out {worker.left_out} spans: ask for fewer steps")
    return found
