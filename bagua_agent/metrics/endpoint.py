"""Serves an agent's metrics, its health and its readiness over HTTP.

/metrics: Prometheus's text format. /healthz: 200 while the agent's loop goes on. /readyz: 200 while workers of this
node are in the newest generation. All are read-only.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bagua_agent.base.loop_health import LoopHealth
from bagua_agent.base.small_http import Answer, ServerTls, SmallHttpServer
from bagua_agent.metrics.families import families
from bagua_agent.metrics.job_picture import JobPicture, PictureAsked
from bagua_contract.net_counters import NoCountersError, read

PICTURE_TIMEOUT_S = 5.0
NO_PICTURE = Answer(
    503, b"the agent has not joined its job yet, or its loop has ended or is stuck; see /healthz\n"
)


class MetricsAnswers:
    """The content of an agent's pages. put: gives the agent's loop a message."""

    def __init__(self, put: Callable[[object], None]) -> None:
        self._put = put
        self._health = LoopHealth(put)

    def answer(self, path: str) -> Answer | None:
        """Returns the answer for a path; None for another path."""
        if path == "/metrics":
            picture = self._picture()
            return NO_PICTURE if picture is None else Answer(200, exposition(picture), CONTENT_TYPE_LATEST)
        if path == "/healthz":
            return self._health.answer()
        if path == "/readyz":
            return readiness(self._picture())
        return None

    def _picture(self) -> JobPicture | None:
        asked = PictureAsked()
        self._put(asked)
        try:
            return asked.answer.get(timeout=PICTURE_TIMEOUT_S)
        except queue.Empty:
            return None


class MetricsEndpoint:
    """Serves the pages between `start` and `stop`.

    port: 0 takes a free one. put: gives the agent's loop a message. host: an address of this node; empty for all. tls:
    None serves plain HTTP.
    """

    def __init__(
        self, port: int, put: Callable[[object], None], host: str = "", tls: ServerTls | None = None
    ) -> None:
        self._answers = MetricsAnswers(put)
        self._server = SmallHttpServer(port, "metrics", self._answer, host=host, tls=tls)

    @property
    def port(self) -> int | None:
        """The port; None if it could not be opened."""
        return self._server.port

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def _answer(self, path: str) -> Answer:
        return self._answers.answer(path) or Answer(404, b"there are /metrics, /healthz and /readyz\n")


def readiness(picture: JobPicture | None) -> Answer:
    """Answers whether workers of this node train."""
    if picture is None:
        return NO_PICTURE
    ranks = sorted(w.global_rank for w in picture.workers if w.global_rank is not None)
    if not ranks:
        return Answer(503, f"no worker of this node is in generation {picture.generation}\n".encode())
    return Answer(200, f"generation {picture.generation}, global ranks {ranks}\n".encode())


def exposition(picture: JobPicture) -> bytes:
    """Returns the metrics in Prometheus's text format."""
    return text_of(families(picture, net_counters(picture)))


def text_of(collected: Iterable[Metric]) -> bytes:
    """Returns the metrics in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Once(list(collected)))
    return generate_latest(registry)


class _Once(Collector):
    def __init__(self, collected: list[Metric]) -> None:
        self._collected = collected

    def collect(self) -> list[Metric]:
        return self._collected


def net_counters(picture: JobPicture) -> dict[int, dict[str, int]]:
    """Returns the counters of the workers that have loaded Bagua-Net, by slot."""
    found = {}
    for worker in picture.workers:
        try:
            found[worker.slot] = read(worker.pid)
        except NoCountersError:
            continue  # it uses another network, or has ended
    return found
