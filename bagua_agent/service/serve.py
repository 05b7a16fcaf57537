"""Runs the daemon's process: from its configuration file to the loop, and to an orderly end that keeps units
running."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bagua_agent.base.errors import StoreUnavailable
from bagua_agent.base.plain_logging import log_to_stderr
from bagua_agent.base.plain_text import plain_line
from bagua_agent.base.signals import SignalsToInbox
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.endpoints import parse_endpoint
from bagua_agent.etcd.leased_keys import LeasedKeys, LeaseEvent, LeaseLapsed
from bagua_agent.node.local_address import UnknownStoreName
from bagua_agent.node.node_address import address_towards
from bagua_agent.security.certificate_files import utc_now
from bagua_agent.security.tls_renewal import RenewedTls
from bagua_agent.service.blocking_work import ThisNode
from bagua_agent.service.config.agent_config import AgentConfig, read_agent_config
from bagua_agent.service.daemon import NodeDaemon
from bagua_agent.service.logs.job_logs import JobLogs
from bagua_agent.service.node.log_service import LogService
from bagua_agent.service.node.node_checks import check_certificates, look_for_trouble, notes, troubles
from bagua_agent.service.node.node_facts import NodeFacts, look_at_node
from bagua_agent.service.node.node_server import NodeServer
from bagua_agent.service.notify import Notifier
from bagua_agent.service.one_daemon import only_daemon
from bagua_agent.service.scheduling.scheduler import Scheduler
from bagua_agent.service.units.child_units import ChildUnits
from bagua_agent.service.units.systemd_units import SystemdUnits, is_there
from bagua_agent.service.units.units import UnitRunner, units_folder
from bagua_contract.addresses import joined
from bagua_contract.distribution import own_version

if TYPE_CHECKING:
    from bagua_agent.service.cluster_page_service import ClusterPage

CONNECT_TIMEOUT_S = 2.0
_SIGNALS = ("SIGTERM", "SIGINT")


class _Stop:
    """Records that a signal asked the daemon to stop. to: called then too, to end what takes long."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._to: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return self._asked.is_set()

    def ask(self, number: int) -> None:
        self._asked.set()
        self._to()

    def tell(self, to: Callable[[], None]) -> None:
        """Calls `to` at each request from now on, and at once if it was asked before."""
        self._to = to
        if self:
            to()

    def wait(self, timeout_s: float) -> None:
        self._asked.wait(timeout_s)


def serve(config_path: str, *, plain_units: bool = False) -> int:
    """Runs the daemon until SIGTERM or SIGINT, and returns the exit code. plain_units: also with systemd. Raises
    UserError."""
    log_to_stderr(logging.INFO)
    config = read_agent_config(config_path, utc_now())
    facts = look_at_node(config)
    runner = _runner(config, plain_units)
    notifier = Notifier()
    os.environ.pop("NOTIFY_SOCKET", None)  # what we start must not speak for us

    stop = _Stop()
    with only_daemon(config.directories_state), SignalsToInbox(_SIGNALS, stop.ask):
        connected = _connected(config, notifier, stop)
        if connected is None:
            return 0
        return _serve(config, facts, runner, notifier, *connected, stop)


def _serve(
    config: AgentConfig,
    facts: NodeFacts,
    runner: UnitRunner,
    notifier: Notifier,
    store: Store,
    address: str,
    stop: _Stop,
) -> int:
    leased = LeasedKeys(store, config.times_node_lease_s, _tell_lapses)
    scheduler = Scheduler(store, leased, config.node_name, _say, config.cluster_policy)
    listening_at = joined(address, config.listen_port)
    node = ThisNode(
        facts,
        listening_at,
        _version(),
        look_for_trouble=lambda: troubles(look_for_trouble(config)),
        look_for_notes=lambda: notes(check_certificates(config, utc_now())),
    )
    daemon = NodeDaemon(
        config,
        node,
        store,
        leased,
        runner,
        _say,
        notifier=notifier,
    )
    stop.tell(daemon.stop)
    log_service: LogService | None = None
    page: ClusterPage | None = None
    try:
        tls = None if config.tls_files is None else RenewedTls(config.tls_files)
        logs = JobLogs(Path(config.directories_log), config.node_name)
        log_service = LogService(lambda: NodeServer(listening_at, logs, daemon.runs, tls), daemon.note, _say)
        log_service.start()
        page = _open_page(config, store, daemon, scheduler)
        _say(f"node {config.node_name} has {facts.slots} slots")
        scheduler.start()
        daemon.run()
    finally:
        if log_service is not None:
            log_service.stop()
        if page is not None:
            page.stop()
        scheduler.stop()
        leased.close()
        store.close()
    _say("stopped; units go on")
    return 0


def _open_page(
    config: AgentConfig, store: Store, daemon: NodeDaemon, scheduler: Scheduler
) -> ClusterPage | None:
    """Opens the cluster's page; None if the configuration asks for none, so no memory is taken for it."""
    if not config.dashboard_listen:
        return None
    from bagua_agent.service.cluster_page_service import open_page

    return open_page(config, store, daemon, scheduler.account, _say)


def _tell_lapses(event: LeaseEvent) -> None:
    if isinstance(event, LeaseLapsed):
        _say("etcd has ended this node's lease, so the node may have counted as lost; its keys are put again")


def _runner(config: AgentConfig, plain: bool) -> UnitRunner:
    if is_there() and not plain:
        return SystemdUnits(config.jobs_memory_max, config.times_kill_grace_s)
    limit = (
        f"; jobs.memory_max = {config.jobs_memory_max} needs systemd and is not kept"
        if config.jobs_memory_max
        else ""
    )
    _say(f"units are plain processes{limit}")
    return ChildUnits(units_folder(config.directories_state))


def _connected(config: AgentConfig, notifier: Notifier, stop: _Stop) -> tuple[Store, str] | None:
    """Returns the store, and this node's address on the way to it. Tries until etcd answers; returns None if the daemon
    is asked to stop before."""
    store = Store(store_config(config.etcd_endpoints, config.store_credentials))
    stop.tell(store.close)
    told = ""
    try:
        while not stop:
            begin_s = time.monotonic()
            try:
                store.connect(CONNECT_TIMEOUT_S)
                # the endpoint that answers first: another's name may not be known, or lead elsewhere
                targets = [parse_endpoint(e).target for e in (store.endpoint, *config.etcd_endpoints)]
                address = address_towards(config.listen_address or None, targets, single_node=False)
            except (StoreUnavailable, UnknownStoreName) as error:
                if str(error) != told and not stop:
                    told = str(error)
                    _say(f"waiting for etcd: {told}")
                notifier.status(f"waiting for etcd: {told}")
            else:
                stop.tell(lambda: None)
                if not stop:
                    return store, address
            stop.wait(max(0.0, begin_s + CONNECT_TIMEOUT_S - time.monotonic()))
    except BaseException:
        store.close()
        raise
    store.close()
    return None


def _say(text: str) -> None:
    print(f"bagua-agent: {plain_line(text)}", file=sys.stderr, flush=True)


def _version() -> str:
    return own_version() or "unknown"
