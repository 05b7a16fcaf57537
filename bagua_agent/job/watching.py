"""Ties a dashboard to an agent: it is served from the agent's start, and shows the job from its join to its end.

The dashboard is imported only where one is asked for: no other agent pays for its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import JobConfig
from bagua_agent.etcd.client import Store


class Watching(Protocol):
    """What the loop tells of. address: where a browser finds the page, as HOST:PORT; empty for none."""

    @property
    def address(self) -> str: ...

    def joined(self, store: Store) -> None:
        """The agent has joined the job."""

    def left(self) -> None:
        """Before the agent closes the store; waits a moment for an open page to see the job's end."""

    def stop(self) -> None: ...


def open_dashboard(
    config: JobConfig, node_name: str, put: Callable[[object], None], say: Callable[[str], None]
) -> Watching:
    """say: prints a line. put: gives the agent's loop a message. Raises UserError."""
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
