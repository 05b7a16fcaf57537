"""Ties what shows a job elsewhere to its agent: the dashboard, metrics, and the sending of metrics and events.

The dashboard is served from the agent's start, and shows the job from its join to its end. All are imported only where
they are asked for: no other agent pays for their memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import JobConfig
from bagua_agent.etcd.client import Store
from bagua_agent.metrics.job_picture import JobPicture
from bagua_agent.metrics.otel_settings import ENDPOINT, OtelSettings
from bagua_contract.addresses import joined
from bagua_contract.distribution import DISTRIBUTION


class Watching(Protocol):
    """The interface of what shows a job elsewhere. address: where a browser finds the page, as HOST:PORT; empty for
    none."""

    @property
    def address(self) -> str: ...

    def joined(self, store: Store) -> None:
        """Begins to show the job, which the agent has joined."""

    def left(self) -> None:
        """Ends showing the job before the agent closes the store; waits a moment for an open page to see the job's
        end."""

    def stop(self) -> None: ...


class Sent(Protocol):
    """The interface of what sends the job's metrics and events elsewhere."""

    def event(self, key: str, value: bytes) -> None:
        """Takes an event of the job, with its key."""

    def last(self, picture: JobPicture) -> None:
        """Takes the job's picture at this node's end."""


class Nowhere:
    """Implements Sent; sends nothing."""

    def event(self, key: str, value: bytes) -> None:
        pass

    def last(self, picture: JobPicture) -> None:
        pass


def open_dashboard(
    config: JobConfig, node_name: str, put: Callable[[object], None], say: Callable[[str], None]
) -> Watching:
    """Starts the dashboard. say: prints a line. put: gives the agent's loop a message. Raises UserError."""
    from bagua_agent.dashboard.collector import Collector
    from bagua_agent.dashboard.exposure import https_side
    from bagua_agent.dashboard.listening import Listening
    from bagua_agent.dashboard.server import Dashboard
    from bagua_agent.metrics.endpoint import MetricsAnswers

    try:
        listening = Listening.parse(config.dashboard or "")
    except ValueError as error:
        raise UserError(f"--dashboard: {error}; use a port, or HOST:PORT") from error
    tls = https_side(listening, config.store_credentials, "--dashboard")
    dashboard = Dashboard(listening, MetricsAnswers(put).answer, tls=tls)

    class Shown:
        """Implements Watching."""

        @property
        def address(self) -> str:
            return dashboard.address

        def joined(self, store: Store) -> None:
            dashboard.watch(Collector(store, config.job_id, node_name))

        def left(self) -> None:
            dashboard.unwatch()

        def stop(self) -> None:
            dashboard.stop()

    dashboard.start()
    if dashboard.address:
        say(f"bagua-launch: dashboard at {dashboard.url}")
    return Shown()


def open_metrics(
    config: JobConfig,
    put: Callable[[object], None],
    say: Callable[[str], None],
    serving: Callable[[str], None],
    opened: ExitStack,
) -> None:
    """Serves metrics where `config` says so, until `opened` is closed.

    put: gives the agent's loop a message. say: prints a line. serving: gets HOST:PORT. Certificates that can't be used
    are a line, and the job goes on without metrics.
    """
    if config.metrics_port is None:
        return
    from bagua_agent.metrics.endpoint import MetricsEndpoint
    from bagua_agent.security.certificate_files import TlsFiles
    from bagua_agent.security.https import HttpsSide
    from bagua_agent.security.tls_renewal import RenewedTls

    try:
        tls = HttpsSide(RenewedTls(TlsFiles(*config.metrics_tls))) if config.metrics_tls else None
    except UserError as error:
        say(f"bagua-launch: no metrics are served: {error}")
        return
    metrics = MetricsEndpoint(config.metrics_port, put, config.metrics_host, tls)
    opened.callback(metrics.stop)
    metrics.start()
    if metrics.port is None:
        return
    if config.metrics_port == 0:
        say(f"bagua-launch: metrics at port {metrics.port}")
    serving(joined(config.metrics_host, metrics.port))


def open_otel(
    config: JobConfig,
    node_name: str,
    put: Callable[[object], None],
    say: Callable[[str], None],
    opened: ExitStack,
) -> Sent:
    """Sends metrics and events where --otel or the standard's variables say so, until `opened` is closed. Raises
    UserError for an --otel that can't be used; variables that can't be are a line."""
    try:
        settings = OtelSettings.of(config.otel, os.environ)
    except ValueError as error:
        if config.otel is not None:
            raise UserError(str(error)) from error
        say(f"bagua-launch: {error}; nothing is sent there")
        return Nowhere()
    if settings is None:
        return Nowhere()
    try:
        from bagua_agent.metrics.otel_export import OtelExport
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install '{DISTRIBUTION}[otel]'"
        if config.otel is not None:
            raise UserError(f"--otel: {missing}") from error
        say(f"bagua-launch: {ENDPOINT} is set, but {missing}; no metrics and events are sent")
        return Nowhere()
    export = OtelExport(settings, config.job_id, node_name, put, say)
    opened.callback(export.stop)
    return export
