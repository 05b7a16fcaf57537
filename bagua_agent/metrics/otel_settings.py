"""Decides where an agent sends metrics and events by OpenTelemetry's protocol, by --otel or the standard's variables.
Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
PROTOCOL = "http/protobuf"
DEFAULT_INTERVAL_S = 60.0  # the standard's
LEAST_INTERVAL_S = 1.0
METRICS_PATH, LOGS_PATH = "v1/metrics", "v1/logs"
OTEL_MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""Of the extra otel: what otel_export.py imports."""


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """The destinations of an agent's export. metrics, events: URLs; None: not sent. interval_s: between two exports of
    metrics; events are sent as they come."""

    metrics: str | None
    events: str | None
    interval_s: float

    @staticmethod
    def of(option: str | None, environ: Mapping[str, str]) -> OtelSettings | None:
        """Returns the settings; None: nothing is sent. option: of --otel, which comes first; then the variables decide.
        Raises ValueError.

        Headers, certificates, compression and time-outs are the SDK's to read.
        """
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return None
        metrics = _url(option, environ, "METRICS", METRICS_PATH)
        events = _url(option, environ, "LOGS", LOGS_PATH)
        if metrics is None and events is None:
            return None
        return OtelSettings(metrics, events, _interval_s(environ.get("OTEL_METRIC_EXPORT_INTERVAL", "")))


def _url(option: str | None, environ: Mapping[str, str], signal: str, path: str) -> str | None:
    if environ.get(f"OTEL_{signal}_EXPORTER", "").strip().lower() == "none":
        return None
    own = f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"
    name, url = next(
        ((n, text) for n, text in (("--otel", option or ""), (own, environ.get(own, ""))) if text),
        (ENDPOINT, environ.get(ENDPOINT, "")),
    )
    if not url:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{name}: {without_user(url)!r} is no URL of a collector; use http://HOST:4318")
    of_signal = f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL"
    protocol = environ.get(of_signal) or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") or PROTOCOL
    if protocol != PROTOCOL and name != "--otel":
        raise ValueError(
            f"{name}: protocol {protocol!r} is not supported; agents send {PROTOCOL}, to port 4318"
        )
    return url if name == own else f"{url.rstrip('/')}/{path}"


def without_user(url: str) -> str:
    """Returns the URL without its user, for a line on a terminal: a URL may hold a password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _interval_s(text: str) -> float:
    if not text:
        return DEFAULT_INTERVAL_S
    try:
        interval_s = float(text) / 1000
    except ValueError:
        interval_s = math.nan
    if not LEAST_INTERVAL_S <= interval_s < math.inf:
        raise ValueError(f"OTEL_METRIC_EXPORT_INTERVAL: {text!r} is no number of milliseconds, 1000 or more")
    return interval_s
