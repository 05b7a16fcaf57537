"""Sends a node's metrics and the job's events to a collector, by OpenTelemetry's SDK over HTTP.

One thread, a short queue, no guarantee. Metrics are those of /metrics; events are the ones that this agent writes. A
collector that does not answer is said once, and so is its return; the thread alone waits for it. Every request is
bounded, and so is `stop`; what is kept is bounded by number, the oldest events go first.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.metrics.export import MetricExportResult
from opentelemetry.sdk.resources import Resource

from bagua_agent.base.background import Failed, OperationEnd, background_thread
from bagua_agent.base.plain_text import shortened
from bagua_agent.history.job_history import JobEvent, read_event
from bagua_agent.metrics.endpoint import net_counters
from bagua_agent.metrics.families import families
from bagua_agent.metrics.job_picture import JobPicture, PictureAsked
from bagua_agent.metrics.otel_data import Beginnings, log_record, metrics_data
from bagua_agent.metrics.otel_settings import OtelSettings, without_user
from bagua_contract.distribution import own_version

log = logging.getLogger(__name__)

REQUEST_S = 5.0  # with its retries, unless the standard's variables say less
PICTURE_TIMEOUT_S = 2.0  # shorter than STOP_S: nothing answers once the loop has ended
NO_PICTURE_S = 1.0  # until the loop is asked again, which answers once the agent has joined the job
MOST_EVENTS = 256
GATHERED_S = 0.5  # events of one change travel together
STOP_S = 3.0  # for what is left at the end
_SDK_LOG = "opentelemetry"


class LastWarning(logging.Handler):
    """Keeps the newest warning of the SDK, whose exporters return no reason, off the terminal."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())


class OtelExport:
    """Sends from construction to `stop`. put: gives the agent's loop a message. say: prints a line."""

    def __init__(
        self,
        settings: OtelSettings,
        job_id: str,
        node_name: str,
        put: Callable[[object], None],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._put = put
        self._say = say
        self._resource = Resource.create(
            {
                "service.name": "bagua",
                "service.version": own_version() or "",
                "bagua.job": job_id,
                "bagua.node": node_name,
            }
        )
        self._warnings = LastWarning()
        sdk = logging.getLogger(_SDK_LOG)
        sdk.addHandler(self._warnings)
        self._sdk_propagated, sdk.propagate = sdk.propagate, False
        self._metrics = (
            None
            if settings.metrics is None
            else OTLPMetricExporter(settings.metrics, timeout=_timeout_s("METRICS"))
        )
        self._logs = (
            None if settings.events is None else OTLPLogExporter(settings.events, timeout=_timeout_s("LOGS"))
        )
        self._beginnings = Beginnings(time.time_ns())
        self._changed = threading.Condition()
        self._events: deque[JobEvent] = deque(maxlen=MOST_EVENTS)
        self._last: JobPicture | None = None  # once the agent leaves its job
        self._stopping = False
        self._failing: set[str] = set()  # URLs that did not take what was sent last
        self._thread = background_thread("bagua-otel", self._run, self._ended)
        self._thread.start()

    def event(self, key: str, value: bytes) -> None:
        """Queues an event of the job, as it is written. From any thread."""
        event = read_event(key, value)
        if event is not None and self._logs is not None:
            with self._changed:
                self._events.append(event)
                self._changed.notify_all()

    def last(self, picture: JobPicture) -> None:
        """Takes the job's picture at its end, whose metrics `stop` sends. From any thread."""
        with self._changed:
            self._last = picture

    def stop(self) -> None:
        """Sends the events that are left, then the metrics of the last picture, both within STOP_S: the loop answers
        for no picture any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(STOP_S)
        for exporter in filter(None, (self._metrics, self._logs)):
            exporter.shutdown()  # ends waits between retries
        self._thread.join(1.0)
        sdk = logging.getLogger(_SDK_LOG)
        sdk.removeHandler(self._warnings)
        sdk.propagate = self._sdk_propagated  # the process may serve another job, or be a notebook's

    def _ended(self, end: OperationEnd[None]) -> None:
        if isinstance(end, Failed):
            log.warning("no metrics and events are sent by OpenTelemetry's protocol any more: %s", end.reason)

    def _run(self) -> None:
        due_s = time.monotonic()
        stopping = False
        while not stopping:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopping or self._has_events, max(0.0, due_s - time.monotonic())
                )
                if self._has_events:
                    self._changed.wait_for(lambda: self._stopping, GATHERED_S)
                stopping = self._stopping
            if not stopping and time.monotonic() >= due_s:
                arrived = self._send_metrics()
                self._tell(self._settings.metrics, arrived)
                wait_s = self._settings.interval_s
                due_s = time.monotonic() + (min(wait_s, NO_PICTURE_S) if arrived is None else wait_s)
                self._tell(self._settings.events, self._send_events())
            elif stopping or self._has_events:
                self._tell(self._settings.events, self._send_events())
                if stopping and self._last is not None and self._settings.metrics not in self._failing:
                    self._tell(self._settings.metrics, self._export(self._last))

    @property
    def _has_events(self) -> bool:
        """Tells whether there are events that are worth a request now: while they are not taken they are tried again
        with the metrics."""
        return bool(self._events) and self._settings.events not in self._failing

    def _send_metrics(self) -> bool | None:
        """Sends the metrics, and tells whether they arrived; None: nothing was sent."""
        if self._metrics is None:
            return None
        asked = PictureAsked()
        self._put(asked)
        try:
            picture = asked.answer.get(timeout=PICTURE_TIMEOUT_S)
        except queue.Empty:
            return None  # the agent has not joined its job yet, or leaves it
        return self._export(picture)

    def _export(self, picture: JobPicture) -> bool | None:
        """Sends a picture's metrics, and tells whether they arrived; None: metrics are not asked for."""
        if self._metrics is None:
            return None
        data = metrics_data(
            families(picture, net_counters(picture)), self._resource, self._beginnings, time.time_ns()
        )
        return self._metrics.export(data) is MetricExportResult.SUCCESS

    def _send_events(self) -> bool | None:
        with self._changed:
            events = list(self._events)
            self._events.clear()
        if not events or self._logs is None:
            return None
        now_ns = time.time_ns()
        arrived = self._logs.export([log_record(event, self._resource, now_ns) for event in events])
        if arrived is LogRecordExportResult.SUCCESS:
            return True
        with self._changed:  # newer ones came meanwhile; the oldest go first
            kept = [*events, *self._events][-MOST_EVENTS:]
            self._events.clear()
            self._events.extend(kept)
        return False

    def _tell(self, url: str | None, arrived: bool | None) -> None:
        """Says once that this URL does not take what is sent, and once that it does again."""
        if url is None or arrived is None or arrived is not (url in self._failing):
            return
        if arrived:
            self._failing.discard(url)
            self._say(f"bagua-launch: the collector at {without_user(url)} takes what is sent again")
        else:
            self._failing.add(url)
            why = f" ({shortened(self._warnings.text, 200)})" if self._warnings.text else ""
            self._say(
                f"bagua-launch: the collector at {without_user(url)} does not take what is sent{why}; the job goes "
                f"on, and it is tried again every {self._settings.interval_s:g} s"
            )


def _timeout_s(signal: str) -> float | None:
    """Returns the time limit of a request; None: the SDK reads it."""
    names = (f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
    return None if any(os.environ.get(name) for name in names) else REQUEST_S
