"""A collector as far as tests need one: takes OTLP over HTTP and keeps what it got."""

from __future__ import annotations

import gzip
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OtlpReceiver:
    """Listens from construction to `stop`. port: of loopback; 0 takes a free one. listener: a socket that listens
    already, for example on a lab host, which is used instead and closed by `stop`."""

    def __init__(self, port: int = 0, listener: socket.socket | None = None) -> None:
        self.metrics: list[Any] = []  # ResourceMetrics
        self.logs: list[Any] = []  # ResourceLogs
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver._take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                return None

        listener = listener or socket.create_server(("127.0.0.1", port))
        self._server = ThreadingHTTPServer(listener.getsockname(), Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listener
        self._server.daemon_threads = True
        self.port = int(listener.getsockname()[1])
        threading.Thread(target=self._server.serve_forever, name="otlp-receiver", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        if path == "/v1/metrics":
            self.metrics += ExportMetricsServiceRequest.FromString(body).resource_metrics
        elif path == "/v1/logs":
            self.logs += ExportLogsServiceRequest.FromString(body).resource_logs

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # -- what came

    def newest(self, name: str) -> dict[frozenset[tuple[str, str]], Any]:
        """The newest points of a metric, by their attributes."""
        found: dict[frozenset[tuple[str, str]], Any] = {}
        for resource in list(self.metrics):
            for metric in (m for scope in resource.scope_metrics for m in scope.metrics if m.name == name):
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    found[frozenset((a.key, a.value.string_value) for a in point.attributes)] = point
        return found

    @property
    def events(self) -> list[Any]:
        """LogRecords, in order."""
        return [r for resource in list(self.logs) for scope in resource.scope_logs for r in scope.log_records]


def attributes(of: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}
