"""Answers for a daemon's metrics, health and readiness over HTTP.

/metrics: Prometheus's text format. /healthz: 200 while the daemon's loop goes on. /readyz: 200 while the daemon reaches
etcd and nothing keeps jobs from its node. /targets: where the jobs of its node serve their metrics. All are read-only.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from bagua_agent.base.loop_health import LoopHealth
from bagua_agent.base.messages import HealthAsked
from bagua_agent.base.plain_text import counted
from bagua_agent.base.small_http import Answer
from bagua_agent.metrics.cluster_families import daemon_families
from bagua_agent.metrics.daemon_picture import DaemonPicture, DaemonPictureAsked, QueuePicture
from bagua_agent.metrics.endpoint import PICTURE_TIMEOUT_S, text_of

NO_PICTURE = Answer(503, b"the daemon's loop has not begun, has ended or is stuck; see /healthz\n")
NO_TARGETS = Answer(
    404, b"jobs.metrics is not true in this node's agent.toml, so its jobs serve no metrics to scrape\n"
)


class DaemonAnswers:
    """The content of a daemon's pages. ask: gives the daemon's loop a question. queue_picture(now): None where this
    daemon does not schedule. targets(): see discovery.py; None where jobs serve no metrics."""

    def __init__(
        self,
        ask: Callable[[HealthAsked | DaemonPictureAsked], None],
        queue_picture: Callable[[float], QueuePicture | None],
        targets: Callable[[], bytes] | None = None,
    ) -> None:
        self._ask = ask
        self._queue_picture = queue_picture
        self._targets = targets
        self._health = LoopHealth(ask)

    def answer(self, path: str) -> Answer | None:
        """Returns the answer for a path; None for another path."""
        if path == "/metrics":
            picture = self._picture()
            if picture is None:
                return NO_PICTURE
            whole = replace(picture, queue=self._queue_picture(time.time()))
            return Answer(200, daemon_exposition(whole), CONTENT_TYPE_LATEST)
        if path == "/healthz":
            return self._health.answer()
        if path == "/readyz":
            return daemon_readiness(self._picture())
        if path == "/targets":
            # Prometheus takes no other content type
            return NO_TARGETS if self._targets is None else Answer(200, self._targets(), "application/json")
        return None

    def _picture(self) -> DaemonPicture | None:
        asked = DaemonPictureAsked()
        self._ask(asked)
        try:
            return asked.answer.get(timeout=PICTURE_TIMEOUT_S)
        except queue.Empty:
            return None


def daemon_exposition(picture: DaemonPicture) -> bytes:
    """Returns the metrics in Prometheus's text format."""
    return text_of(daemon_families(picture))


def daemon_readiness(picture: DaemonPicture | None) -> Answer:
    """Answers whether jobs can come to this node."""
    if picture is None:
        return NO_PICTURE
    if not picture.in_touch:
        return Answer(503, b"etcd's watch does not reach this daemon\n")
    if picture.troubles:
        kept = (
            f"{counted(picture.troubles, 'fault')} of this node keeps jobs away; see `bagua-launch nodes`\n"
        )
        return Answer(503, kept.encode())
    return Answer(200, f"{picture.slots_used} of {picture.slots} slots in use\n".encode())
