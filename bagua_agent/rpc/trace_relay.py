"""Passes spans of this node's workers to the one call that asked for a trace (docs/design/tracing.md).

One trace at a time. It lives as long as the call: nothing is stored, and no record of etcd names it. Everything here is
called from gRPC's threads. Invariant: what waits to be read by the caller has a bounded size; what has no room is
counted and left out.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator

from bagua_agent.base.errors import BaguaError
from bagua_contract import session_pb2, trace_pb2

MOST_WAITING_BYTES = 32 << 20
LONGEST_S = 3600.0
MOST_STEPS = 100_000
MOST_SPANS = 100_000  # of a worker: 1.5 MB, a fraction of what its session may carry at once
_NUMBER_BITS = 63

# Sends an order to these workers, or to all that have a session; returns their ids.
Tell = Callable[[trace_pb2.TraceOrder, list[str] | None], list[str]]


class TraceBusy(BaguaError):
    """Raised if another command traces this node's workers."""


class Trace:
    """The trace of one call. Ends by `end`, or when its time is over."""

    def __init__(self, request: trace_pb2.TraceRequest, now_s: float) -> None:
        self.asker = request.asker[:200]
        self.since_s = now_s
        self.workers: list[str] = []  # that got the order at the begin
        self.until_s = now_s + min(max(0.0, request.within_s), LONGEST_S)
        self.order = trace_pb2.TraceOrder(
            number=secrets.randbits(_NUMBER_BITS),
            steps=min(max(1, request.steps), MOST_STEPS),
            most_spans=min(request.most_spans, MOST_SPANS),
        )
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[trace_pb2.TraceReply | None] = queue.SimpleQueue()
        self._waiting_bytes = 0
        self._left_out_bytes = 0

    def put(self, reply: trace_pb2.TraceReply) -> None:
        size_bytes = reply.ByteSize()
        with self._lock:
            if self._waiting_bytes + size_bytes > MOST_WAITING_BYTES:
                self._left_out_bytes += size_bytes
                return
            self._waiting_bytes += size_bytes
        self._waiting.put(reply)

    def end(self) -> None:
        self._waiting.put(None)

    def replies(self) -> Iterator[trace_pb2.TraceReply]:
        """Yields the replies until the end. Blocks."""
        while (left_s := self.until_s - time.monotonic()) > 0:
            try:
                reply = self._waiting.get(timeout=left_s)
            except queue.Empty:
                break
            if reply is None:
                break
            with self._lock:
                self._waiting_bytes -= reply.ByteSize()
            yield reply
        if self._left_out_bytes:
            yield trace_pb2.TraceReply(left_out=self._left_out_bytes)


class TraceRelay:
    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._trace: Trace | None = None

    def begin(self, request: trace_pb2.TraceRequest) -> Trace:
        """Orders a trace of all workers that have a session, and of those that open one meanwhile. Raises TraceBusy."""
        now_s = time.monotonic()
        trace = Trace(request, now_s)
        with self._lock:
            other = self._trace
            if other is not None:
                raise TraceBusy(f"{other.asker} has been tracing it for {now_s - other.since_s:.0f} s")
            self._trace = trace
        trace.workers = self._tell(trace.order, None)
        return trace

    def end(self, trace: Trace) -> None:
        """Ends the trace: workers record no longer. Doing it twice is harmless."""
        with self._lock:
            if self._trace is not trace:
                return
            self._trace = None
        self._tell(trace_pb2.TraceOrder(number=trace.order.number), None)

    def heard(self, worker_id: str, message: session_pb2.WorkerMessage) -> bool:
        """Handles a message of a worker during a trace. Returns whether it is of a trace, and concerns the agent no
        further."""
        kind, trace = message.WhichOneof("kind"), self._trace
        if kind == "hello" and trace is not None:
            self._tell(trace.order, [worker_id])
            trace.put(trace_pb2.TraceReply(appeared=trace_pb2.WorkerEvent(worker_id=worker_id)))
        if kind != "spans":
            return False
        if trace is not None and message.spans.number == trace.order.number:
            spans = trace_pb2.WorkerSpans(worker_id=worker_id, spans=message.spans)
            trace.put(trace_pb2.TraceReply(spans=spans))
        return True

    def gone(self, worker_id: str) -> None:
        """Notes in the trace that the worker's session is over."""
        if (trace := self._trace) is not None:
            trace.put(trace_pb2.TraceReply(ended=trace_pb2.WorkerEvent(worker_id=worker_id)))
