"""Makes OpenTelemetry's data of the metrics' families and of the job's events. Pure.

Names are those of Prometheus without `_total`, which a collector's own exporter for Prometheus adds. Job and node are
attributes of the resource; the other labels are attributes of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric as Family

from bagua_agent.history.job_history import EventKind, JobEvent
from bagua_agent.metrics.families import LABELS

SCOPE = InstrumentationScope("bagua")
MOST_SERIES = 50_000  # whose beginnings are kept
_WARNINGS = (
    EventKind.WORKER_LOST,
    EventKind.WORKER_FAILED,
    EventKind.NODE_LOST,
    EventKind.STORE_AWAY,
    EventKind.KEYS_LOST,
    EventKind.AGENT_FAILED,
)

Series = tuple[str, tuple[tuple[str, str], ...]]


class Beginnings:
    """Remembers when each counter began: a worker's begin at 0 again with its successor."""

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._seen: dict[Series, tuple[float, int]] = {}  # newest value, beginning

    def of(self, series: Series, value: float, now_ns: int) -> int:
        """Returns the beginning of a counter that has `value` now."""
        newest, began_ns = self._seen.get(series, (0.0, self._since_ns))
        if value < newest:
            began_ns = now_ns
        if series in self._seen or len(self._seen) < MOST_SERIES:
            self._seen[series] = (value, began_ns)
        return began_ns


def metrics_data(
    families: Iterable[Family], resource: Resource, beginnings: Beginnings, now_ns: int
) -> MetricsData:
    """Returns the families in OpenTelemetry's form. Families without samples are left out."""
    metrics = [
        Metric(family.name, family.documentation, "", data)
        for family in families
        if (data := _data(family, beginnings, now_ns)) is not None
    ]
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _data(family: Family, beginnings: Beginnings, now_ns: int) -> Any:
    if family.type == "histogram":
        histograms = list(_histograms(family, beginnings, now_ns))
        return Histogram(histograms, AggregationTemporality.CUMULATIVE) if histograms else None
    counts = family.type == "counter"
    points = []
    for sample in family.samples:
        labels = _labels(sample.labels)
        began_ns = beginnings.of((family.name, labels), sample.value, now_ns) if counts else 0
        points.append(NumberDataPoint(dict(labels), began_ns, now_ns, float(sample.value)))
    if not points:
        return None
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(points)


def _labels(all_labels: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, value) for name, value in all_labels.items() if name not in (*LABELS, "le")))


def _histograms(family: Family, beginnings: Beginnings, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Converts a histogram: Prometheus counts what is at most a bound; OpenTelemetry what lies between two."""
    below: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = _labels(sample.labels)
        if sample.name.endswith("_bucket"):
            below.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    for labels, buckets in below.items():
        buckets.sort()
        counts = [int(count) for _, count in buckets]
        between = [count - before for count, before in zip(counts, [0, *counts[:-1]], strict=True)]
        yield HistogramDataPoint(
            dict(labels),
            beginnings.of((family.name, labels), counts[-1], now_ns),
            now_ns,
            counts[-1],
            sums.get(labels, math.nan),
            between,
            [bound for bound, _ in buckets if bound < math.inf],
            None,  # type: ignore[arg-type,unused-ignore]  # not known, and optional in the protocol
            None,  # type: ignore[arg-type,unused-ignore]
        )


def log_record(event: JobEvent, resource: Resource, now_ns: int) -> ReadableLogRecord:
    """Makes a record of an event of the job, as OpenTelemetry's events are: a log record with a name."""
    attributes: dict[str, str | int | float] = {"bagua.node": event.node_name}
    if event.generation:
        attributes["bagua.generation"] = event.generation
    if event.generation_kind:
        attributes["bagua.generation_kind"] = event.generation_kind.lower()
    if event.world_size:
        attributes["bagua.world_size"] = event.world_size
    if event.worker_id:
        attributes["bagua.worker"] = event.worker_id
    if event.kind is EventKind.GENERATION_IN_FORCE:
        attributes["bagua.lost_seconds"] = event.lost_s
    is_warning = event.kind in _WARNINGS
    return ReadableLogRecord(
        LogRecord(
            timestamp=int(event.time_unix_s * 1e9),
            observed_timestamp=now_ns,
            severity_text="WARN" if is_warning else "INFO",
            severity_number=SeverityNumber.WARN if is_warning else SeverityNumber.INFO,
            body=event.text,
            attributes=attributes,
            event_name=f"bagua.{event.kind.name.lower()}",
        ),
        resource,
        SCOPE,
    )
