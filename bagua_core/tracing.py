"""Records spans of this worker while its job is traced (docs/design/tracing.md).

The session's thread brings the order and the engine begins it at a lap: the end of a step, or the entry into a
generation. From there to its end `active` is the recorder. Elsewhere it is None, and a place that would record a span
costs one look at it. Laps follow each other without a gap, in the script's thread; its other spans lie within them.
Knows neither session nor engine. Invariant: a recorder keeps no more spans than its order allows, and counts the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from bagua_contract import trace_pb2

SCRIPT, COLLECTIVES = "script", "collectives"
"""Tracks: of the script's thread, with what autograd does for it; of operations under way. Others are threads."""

NO_VALUE = -1
STEP, ROLLED_BACK = "step", "step rolled back"
NOT_AVERAGED = "round not averaged"  # the local steps of this lap are kept
_SENT_EVERY_S = 0.25
_MOST_IN_A_MESSAGE = 4000  # 60 KB: an agent takes messages of 1 MiB

_Entry = tuple[int, int, int, int, int]  # name, track, begin, duration, value


class Recorder:
    """Records one trace of this worker. send: takes a message, from any thread."""

    def __init__(
        self,
        order: trace_pb2.TraceOrder,
        send: Callable[[trace_pb2.Spans], None],
        position: trace_pb2.Position | None,
    ) -> None:
        self.number = order.number
        self._steps_left = order.steps
        self._room = order.most_spans
        self._send = send
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []
        self._positions = [] if position is None else [position]
        self._names: dict[str, int] = {}
        self._tracks: dict[str, int] = {}
        self._sent_names = self._sent_tracks = 0
        self._left_out = 0
        self._sent_s = 0.0
        self._is_over = False
        self._begun_ns = 0
        self._script_thread = 0
        self._lap_ns = 0
        self._is_boundary_due = False
        self._backward_ns = 0

    # -- laps, in the script's thread

    def lap(self, name: str, value: int) -> bool:
        """Records all since the last lap as `name`. The first call begins the record. Returns whether the trace is
        done."""
        now_ns = time.monotonic_ns()
        if not self._begun_ns:
            self._begun_ns = now_ns
            self._script_thread = threading.get_ident()
        else:
            self.span(name, self._lap_ns, now_ns, value, SCRIPT)
            self._steps_left -= name == STEP
        self._lap_ns, self._is_boundary_due = now_ns, True
        done = self._steps_left <= 0
        if done or now_ns * 1e-9 - self._sent_s >= _SENT_EVERY_S:
            self.flush(done)
        return done

    def boundary_ends(self) -> None:
        """Records the time since the last lap as a boundary, for following the job, unless one has been recorded
        since."""
        if self._is_boundary_due:
            self._is_boundary_due = False
            self.span("boundary", self._lap_ns, track=SCRIPT)

    def backward_begins(self) -> None:
        """Notes the begin of a backward. Several outputs of a model may say so."""
        if not self._backward_ns:
            self._backward_ns = time.monotonic_ns()

    def backward_ends(self) -> None:
        begin_ns, self._backward_ns = self._backward_ns, 0
        if begin_ns > self._lap_ns:
            self.span("backward", begin_ns, track=SCRIPT)

    # -- spans, in any thread

    def span(
        self,
        name: str,
        begin_ns: int,
        end_ns: int | None = None,
        value: int = NO_VALUE,
        track: str | None = None,
    ) -> None:
        """Records a span. Times are of time.monotonic_ns(); without end_ns it lasts until now. track: None for that of
        the calling thread. What began before the record did is left out."""
        if begin_ns < self._begun_ns or not self._begun_ns:
            return
        duration_ns = max(1, (time.monotonic_ns() if end_ns is None else end_ns) - begin_ns)
        self._add(name, begin_ns, duration_ns, value, track)

    def instant(self, name: str, value: int = NO_VALUE) -> None:
        if self._begun_ns:
            self._add(name, time.monotonic_ns(), 0, value, None)

    def _add(self, name: str, begin_ns: int, duration_ns: int, value: int, track: str | None) -> None:
        if track is None:
            own = threading.current_thread()
            track = SCRIPT if own.ident == self._script_thread else own.name
        with self._lock:
            if self._is_over:
                return
            if self._room <= 0:
                self._left_out += 1
                return
            self._room -= 1
            name_index = self._names.setdefault(name, len(self._names))
            track_index = self._tracks.setdefault(track, len(self._tracks))
            self._entries.append((name_index, track_index, begin_ns, duration_ns, value))

    def moved(self, position: trace_pb2.Position) -> None:
        with self._lock:
            self._positions.append(position)

    def flush(self, done: bool) -> None:
        """Sends what is recorded. done: nothing more comes."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = done
            self._sent_s = time.monotonic()
            entries, self._entries = self._entries, []
            for at in range(0, max(1, len(entries)), _MOST_IN_A_MESSAGE):
                rest = len(entries) - at
                self._send(
                    self._message(entries[at : at + _MOST_IN_A_MESSAGE], done and rest <= _MOST_IN_A_MESSAGE)
                )

    def _message(self, entries: list[_Entry], done: bool) -> trace_pb2.Spans:
        """Returns the message for `entries`. Called under the lock."""
        names, tracks = list(self._names)[self._sent_names :], list(self._tracks)[self._sent_tracks :]
        self._sent_names, self._sent_tracks = len(self._names), len(self._tracks)
        positions, self._positions = self._positions, []
        base_ns = entries[0][2] if entries else 0
        return trace_pb2.Spans(
            number=self.number,
            new_names=names,
            new_tracks=tracks,
            names=[e[0] for e in entries],
            tracks=[e[1] for e in entries],
            base_ns=base_ns,
            begins_ns=[e[2] - base_ns for e in entries],
            durations_ns=[e[3] for e in entries],
            values=[e[4] for e in entries],
            left_out=self._left_out,
            done=done,
            positions=positions,
        )


active: Recorder | None = None
_current: Recorder | None = None  # ordered; `active` once it has begun
_position: trace_pb2.Position | None = None
_lock = threading.Lock()  # of the two above: the session's thread orders, the script's begins and ends


def take(order: trace_pb2.TraceOrder, send: Callable[[trace_pb2.Spans], None]) -> None:
    """Takes an order, which begins at the next lap, and replaces another. One without steps ends the trace of its
    number, with what is recorded so far. Called in the session's thread."""
    global active, _current
    with _lock:
        if order.steps:
            if _current is None or _current.number != order.number:
                active, _current = None, Recorder(order, send, _position)
            return
        ended = _current if _current is not None and _current.number == order.number else None
        if ended is not None:
            active = _current = None
    if ended is not None:
        ended.flush(True)


def lap(name: str, value: int = NO_VALUE) -> None:
    """Records all since the last lap as `name`. Called in the script's thread."""
    global active, _current
    recorder = _current
    if recorder is None:
        return
    done = recorder.lap(name, value)
    with _lock:
        if _current is recorder:
            active = None if done else recorder
            _current = active


def moved(generation: int, global_rank: int, world_size: int, kind: str, reason: str, step: int) -> None:
    """Notes this worker's place in the job from now on. It is kept for a trace that begins later."""
    global _position
    _position = position = trace_pb2.Position(
        at_ns=time.monotonic_ns(),
        generation=generation,
        global_rank=global_rank,
        world_size=world_size,
        kind=kind,
        reason=reason[:500],
        step=step,
    )
    if (recorder := _current) is not None:
        recorder.moved(position)


class _Untraced:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


class _Span:
    __slots__ = ("_begin_ns", "_name", "_recorder", "_track", "_value")

    def __init__(self, recorder: Recorder, name: str, value: int, track: str | None) -> None:
        self._recorder, self._name, self._value, self._track = recorder, name, value, track

    def __enter__(self) -> None:
        self._begin_ns = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.span(self._name, self._begin_ns, value=self._value, track=self._track)


_UNTRACED = _Untraced()


def span(name: str, value: int = NO_VALUE, track: str | None = None) -> _Span | _Untraced:
    """Returns a context that records a span in the calling thread, if the job is traced."""
    recorder = active
    return _UNTRACED if recorder is None else _Span(recorder, name, value, track)
