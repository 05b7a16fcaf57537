"""Metrics and events at a real receiver of OpenTelemetry's protocol; one that is away is said once."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bagua_agent.base.errors import UserError
from bagua_agent.history import job_history
from bagua_agent.job.watching import open_otel
from bagua_agent.metrics.job_picture import PictureAsked, WorkerPicture
from bagua_agent.metrics.otel_settings import OtelSettings, without_user
from bagua_contract import session_pb2
from tests.agent.metrics import otlp_receiver
from tests.agent.metrics.otlp_receiver import OtlpReceiver
from tests.agent.metrics.test_job_metrics import PROGRESS, picture
from tests.lab.wait import eventually

DEADLINE_S = 40.0
EXTRA = "nothing is sent to a collector: pip install bagua-elastic[otel]"
GENERATION = job_history.in_force(3, "generation 3 is in force from step 7", 1.5)


@pytest.mark.parametrize(
    ("option", "environ", "found"),
    [
        (None, {}, None),
        ("http://c:4318/", {}, ("http://c:4318/v1/metrics", "http://c:4318/v1/logs", 60.0)),
        (None, {"": "https://c/otlp"}, ("https://c/otlp/v1/metrics", "https://c/otlp/v1/logs", 60.0)),
        (None, {"METRICS_": "http://m:1/x", "": "http://c"}, ("http://m:1/x", "http://c/v1/logs", 60.0)),
        (None, {"LOGS_": "http://l:1/x"}, (None, "http://l:1/x", 60.0)),
    ],
)
def test_where_it_sends(option: str | None, environ: dict[str, str], found: Any) -> None:
    names = {f"OTEL_EXPORTER_OTLP_{signal}ENDPOINT": url for signal, url in environ.items()}
    settings = OtelSettings.of(option, names)
    assert (
        found is None
        if settings is None
        else found == (settings.metrics, settings.events, settings.interval_s)
    )
    assert OtelSettings.of(option, {**names, "OTEL_SDK_DISABLED": "TRUE"}) is None


def test_what_the_standard_s_variables_turn_off_and_what_is_refused() -> None:
    only = OtelSettings.of("http://c", {"OTEL_LOGS_EXPORTER": "none", "OTEL_METRIC_EXPORT_INTERVAL": "5000"})
    assert only == OtelSettings("http://c/v1/metrics", None, 5.0)
    for option, environ, words in (
        ("c:4318", {}, "--otel: 'c:4318' is no URL"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "ftp://c"},
            "OTEL_EXPORTER_OTLP_ENDPOINT: 'ftp://c' is no URL",
        ),
        (
            None,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "protocol 'grpc' is not supported",
        ),
        ("http://c", {"OTEL_METRIC_EXPORT_INTERVAL": "nan"}, "no number of milliseconds"),
        ("http://c", {"OTEL_METRIC_EXPORT_INTERVAL": "5"}, "no number of milliseconds"),
    ):
        with pytest.raises(ValueError, match=words):
            OtelSettings.of(option, environ)


class Sending:
    """An agent as far as this is concerned: a loop that answers for pictures, and a terminal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        self.said: list[str] = []
        self.steps = 17
        self._opened = ExitStack()

    def begin(self, url: str | None) -> Any:
        config = SimpleNamespace(job_id="demo", otel=url)
        return open_otel(cast(Any, config), "h1", self._put, self.said.append, self._opened)

    def _put(self, asked: object) -> None:
        assert isinstance(asked, PictureAsked)
        progress = session_pb2.Progress()
        progress.CopyFrom(PROGRESS)
        progress.step = self.steps
        asked.answer.put(picture(workers=(WorkerPicture(0, 11, 1, progress),)))

    def end(self) -> None:
        self._opened.close()


@pytest.fixture
def sending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sending]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=EXTRA)
    made = Sending(monkeypatch)
    yield made
    made.end()
    assert "bagua-otel" not in [thread.name for thread in threading.enumerate()]


def test_metrics_and_events_arrive_and_a_collector_that_is_away_is_said_once(sending: Sending) -> None:
    receiver = OtlpReceiver()
    take_event = (export := sending.begin(receiver.url)).event
    take_event("generation-9", b"\xff no event")
    take_event("in-force-3", GENERATION.encode("h1", 1000.0))
    step = frozenset({("slot", "0")})
    eventually(lambda: receiver.newest("bagua_step").get(step), DEADLINE_S, "a metric")
    assert receiver.newest("bagua_step")[step].as_double == 17
    sent = receiver.newest("bagua_sent_bytes")[frozenset({("slot", "0"), ("algorithm", "bytegrad")})]
    assert sent.as_double == 4000 and 0 < sent.start_time_unix_nano < sent.time_unix_nano
    times = receiver.newest("bagua_step_seconds")[step]
    assert (times.count, list(times.bucket_counts)[:2], times.sum) == (3, [2, 1], 0.004)
    assert len(times.bucket_counts) == len(times.explicit_bounds) + 1 and not times.HasField("min")
    about = otlp_receiver.attributes(receiver.metrics[0].resource)
    assert (about["service.name"], about["bagua.job"], about["bagua.node"]) == ("bagua", "demo", "h1")

    [event] = eventually(lambda: receiver.events, DEADLINE_S, "an event")
    assert (event.event_name, event.body.string_value) == ("bagua.generation_in_force", GENERATION.text)
    assert event.time_unix_nano == 1000 * 10**9
    known = otlp_receiver.attributes(event)
    assert (known["bagua.generation"], known["bagua.lost_seconds"], known["bagua.node"]) == (3, 1.5, "h1")

    receiver.stop()
    eventually(lambda: sending.said, DEADLINE_S, "it is said")
    assert f"the collector at {receiver.url}/v1/" in sending.said[0] and "the job goes on" in sending.said[0]
    assert without_user("http://me:secret@c:1/v1") == "http://c:1/v1"
    take_event("in-force-4", job_history.in_force(4, "later", 0.0).encode("h1", 2000.0))
    again = OtlpReceiver(receiver.port)
    eventually(lambda: again.events, 2 * DEADLINE_S, "what was kept is sent")
    sending.steps = 40
    eventually(lambda: again.newest("bagua_step"), 2 * DEADLINE_S, "metrics are sent again")
    back = f"{receiver.url}/v1/metrics takes what is sent again"
    eventually(lambda: any(back in line for line in sending.said), DEADLINE_S, "it is said")
    take_event("ended", job_history.ended("succeeded", "").encode("h1", 3000.0))
    export.last(picture(exits={(0, "signal"): 3}))
    sending.end()
    exits = again.newest("bagua_worker_exits")[frozenset({("slot", "0"), ("how", "signal")})]
    assert exits.as_double == 3.0, "the metrics of the end are sent, long before the interval has passed"
    assert again.events[-1].event_name == "bagua.job_ended", "what is left is sent at the end"
    of_metrics = [line for line in sending.said if "/v1/metrics" in line]
    assert len(of_metrics) == 2, "its failure and its return, each once"
    again.stop()


def test_a_collector_that_says_nothing_does_not_hold_up_the_end(sending: Sending) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    take_event = (export := sending.begin(f"http://127.0.0.1:{silent.getsockname()[1]}")).event
    export.last(picture())
    accepted, _ = silent.accept()
    for number in range(1000):
        take_event(f"in-force-{number}", GENERATION.encode("h1", 1000.0))
    sending.end()
    accepted.close()
    silent.close()
    thread = next((t for t in threading.enumerate() if t.name == "bagua-otel"), None)
    if thread is not None:  # its request ends by its own time-out
        thread.join(DEADLINE_S)


def test_a_counter_that_begins_again_has_a_new_beginning() -> None:
    pytest.importorskip("opentelemetry.sdk", reason=EXTRA)
    from bagua_agent.metrics.otel_data import Beginnings

    beginnings = Beginnings(100)
    of = [
        beginnings.of(("steps", ()), value, now_ns)
        for value, now_ns in ((5, 200), (9, 300), (2, 400), (3, 500))
    ]
    assert of == [100, 100, 400, 400]


def test_without_the_extra_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [
        n for n in sys.modules if n.startswith(("opentelemetry.", "bagua_agent.metrics.otel_export"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    sending = Sending(monkeypatch)
    with pytest.raises(
        UserError, match=r"--otel: opentelemetry\S* is not installed: pip install 'bagua-elastic\[otel\]'"
    ):
        sending.begin("http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    sending.begin(None).event("key", b"")
    [line] = sending.said
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry" in line
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "127.0.0.1")
    sending.begin(None)
    assert "is no URL of a collector" in sending.said[1] and "nothing is sent there" in sending.said[1]
