"""Serves the cluster's page, metrics and health of the daemon, and where its jobs serve theirs, from a node's daemon.

Imported only where the configuration asks for it. The page costs the daemon nothing else:
a port that is taken, or a look that fails, is a line or a note on the page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from bagua_agent.dashboard.cluster_collector import ClusterCollector
from bagua_agent.dashboard.listening import Listening
from bagua_agent.dashboard.server import Dashboard
from bagua_agent.etcd.client import Store
from bagua_agent.metrics.daemon_endpoint import DaemonAnswers
from bagua_agent.security.https import HttpsSide
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.daemon import NodeDaemon
from bagua_agent.service.scheduling.queue_account import QueueAccount

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClusterPage:
    """The cluster's page, which is served until `stop`. `stop` comes before the store is closed."""

    dashboard: Dashboard
    cluster: ClusterCollector

    def stop(self) -> None:
        self.cluster.stop()
        self.dashboard.stop()


def open_page(
    config: AgentConfig, store: Store, daemon: NodeDaemon, account: QueueAccount, say: Callable[[str], None]
) -> ClusterPage:
    """Starts to serve the cluster's page, and returns it. account: of this daemon's scheduler. say: a line for the
    daemon's log."""
    # the scheduler's daemon tells of records that can't be read; here they are a detail
    cluster = ClusterCollector(store, lambda text: log.debug("cluster page: %s", text), config.node_name)
    targets = daemon.metrics_targets if config.jobs_metrics else None
    answers = DaemonAnswers(daemon.ask, account.picture, targets)
    # also at loopback: jobs of other accounts run on this host
    tls = None if config.tls_files is None else HttpsSide(RenewedTls(config.tls_files))
    dashboard = Dashboard(Listening.parse(config.dashboard_listen), answers.answer, cluster=cluster, tls=tls)
    dashboard.start()
    if dashboard.address:
        say(f"the cluster's page is at {dashboard.url}")
    return ClusterPage(dashboard, cluster)
