"""Serves the page of a job or of a cluster, its data, output, stacks and collectives, and metrics and health over HTTP.

/ is the page of the job, or of the cluster; a cluster's jobs have theirs at /job/JOB/. Below a page, api/ has its data.
Read-only: no request changes anything. Listens on the loopback interface unless another address is asked for, and then
answers requests to that address alone, so that a page of another site can't reach it through a name of its own. Where
it listens beyond loopback, exposure.py gives it TLS.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from importlib import resources

from bagua_agent.base.errors import BaguaError
from bagua_agent.base.small_http import Answer, ServerTls, SmallHttpServer
from bagua_agent.dashboard.cluster_collector import ClusterCollector
from bagua_agent.dashboard.collector import Collector
from bagua_agent.dashboard.listening import Listening
from bagua_agent.observation.job_output import STREAMS
from bagua_contract.addresses import is_loopback, joined

PAGE_HEADER = "X-Bagua-Page"  # only scripts of the page itself can send it
MOST_THREADS = 16
_CONTENT_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_JSON = "application/json"
_JOB_PATH = re.compile(r"/job/([A-Za-z0-9._-]{1,100})(/.*)")
_STATIC_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.(html|css|js|svg)")
_HEADERS = {
    # connect-src: the page looks whether another agent serves it, once its own is gone
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self' http: https:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_ASKS_WORKERS = ("/api/stacks/", "/api/collectives/")
_NOT_FOUND = Answer(404, b"there are /, /metrics, /healthz and /readyz\n")


class Dashboard:
    """Serves between `start` and `stop`; shows a job between `watch` and `unwatch`, or a cluster.

    more(path): answers of the agent or the daemon itself (metrics, health); None for a path that it does not know.
    """

    def __init__(
        self,
        listening: Listening,
        more: Callable[[str], Answer | None] = lambda path: None,
        *,
        cluster: ClusterCollector | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._tls = tls
        self._listening = listening
        self._more = more
        self._cluster = cluster
        self._collector: Collector | None = None
        self._server = SmallHttpServer(
            listening.port,
            "dashboard",
            self._answer,
            host=listening.host,
            threads=MOST_THREADS,
            headers=_HEADERS,
            guard=self._guard,
            or_any_port=listening.or_any_port,
            tls=tls,
        )

    @property
    def address(self) -> str:
        """The address of the page for a browser, HOST:PORT; empty if the port could not be opened."""
        port = self._server.port
        return "" if port is None else joined(self._listening.host, port)

    @property
    def url(self) -> str:
        """The URL of the page for a browser; empty if the port could not be opened."""
        return f"{'http' if self._tls is None else 'https'}://{self.address}/" if self.address else ""

    def start(self) -> None:
        self._server.start()

    def watch(self, collector: Collector) -> None:
        self._collector = collector

    def unwatch(self) -> None:
        """Shows the job no more, because the agent leaves it: an open page gets its end."""
        collector = self._collector
        if collector is not None:
            collector.stop(shows_end=True)

    def stop(self) -> None:
        self._server.stop()

    def _guard(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        """Returns the answer to a request that is refused; None if it is not refused."""
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if host.count(":") == 1 or host.startswith("[") else host
        if is_loopback(self._listening.host) and not (is_loopback(name.strip("[]")) or name == "localhost"):
            return Answer(
                403, b"this page is for browsers of its own host; use http://localhost and its port\n"
            )
        if any(asked in path for asked in _ASKS_WORKERS) and PAGE_HEADER.lower() not in headers:
            return Answer(403, f"only the page itself asks workers ({PAGE_HEADER})\n".encode())
        return None

    def _answer(self, path: str) -> Answer:
        if path.startswith("/static/"):
            return _static(path.removeprefix("/static/"))
        if (answer := self._more(path)) is not None:
            return answer
        if self._cluster is None:
            return _of_job(self._collector, path)
        if path == "/":
            return _static("cluster.html")
        if path == "/api/page":
            return Answer(200, self._cluster.page(), _JSON)
        if (below := _JOB_PATH.fullmatch(path)) is None:
            return _NOT_FOUND
        if below[2] == "/":
            return _static("index.html")  # its data says whether there is such a job
        try:
            found = self._cluster.job(below[1])
        except BaguaError as error:
            found = f"etcd does not answer: {error}"
        if isinstance(found, str):
            return _json({"problem": found})
        return _of_job(found, below[2])


def _of_job(collector: Collector | None, path: str) -> Answer:
    if path == "/":
        return _static("index.html")
    if path == "/api/page":
        page = (
            b'{"problem": "this agent has not joined its job yet"}' if collector is None else collector.page()
        )
        return Answer(200, page, _JSON)
    if collector is None or not path.startswith("/api/"):
        return _NOT_FOUND
    try:
        return _of_worker(collector, path.removeprefix("/api/").split("/"))
    except BaguaError as error:
        return _json({"problem": str(error)})


def _of_worker(collector: Collector, words: list[str]) -> Answer:
    """Answers log/AGENT/SLOT/STREAM/POSITION, stacks/AGENT/SLOT or collectives/AGENT/SLOT. Raises
    InfrastructureLost."""
    kind, agent_id, slot, *more = [*words, "", "", ""][: max(3, len(words))]
    agent = collector.agent(agent_id)
    if not _is_number(slot) or kind not in ("log", "stacks", "collectives"):
        return _NOT_FOUND
    if agent is None:
        return _json({"problem": f"agent {agent_id[:80]!r} is not in the job any more"})
    if kind == "stacks":
        stacks = collector.agents.stacks(agent, int(slot))
        return _json({"text": stacks.text, "problem": stacks.problem})
    if kind == "collectives":
        return _json({"text": collector.collectives(agent_id, int(slot)), "problem": ""})
    if len(more) != 2 or more[0] not in STREAMS or not _is_number(more[1]):
        return _NOT_FOUND
    part = collector.agents.output(agent, int(slot), STREAMS[more[0]], int(more[1]))
    return _json(
        {
            "kept": part.kept,
            "position": part.position,
            "next": part.position + len(part.data),
            "text": part.data.decode("utf-8", "replace"),
            "problem": "",
        }
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 15


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), _JSON)


def _static(name: str) -> Answer:
    if not _STATIC_NAME.fullmatch(name):
        return _NOT_FOUND
    file = resources.files("bagua_agent.dashboard").joinpath("static", name)
    if not file.is_file():
        return _NOT_FOUND
    return Answer(200, file.read_bytes(), _CONTENT_TYPES[name.rpartition(".")[2]])
