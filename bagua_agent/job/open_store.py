"""Opens this job's store: a given one, one hosted here for other nodes, or one private to this node."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.backoff import delay_s
from bagua_agent.base.errors import BaguaError, StoreUnavailable, UserError
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.config.job_config import JobConfig, StoreCredentials
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.endpoints import DEFAULT_PORT, parse_endpoint
from bagua_agent.etcd.known_defects import warning
from bagua_agent.etcd.server.embedded import START_TIMEOUT_S, PortTaken
from bagua_agent.etcd.server.hosted import HostedEtcd
from bagua_agent.node.listening_address import listening_target
from bagua_agent.node.local_address import LOOPBACK
from bagua_contract.addresses import family_of, joined

log = logging.getLogger(__name__)

_IS_ANYONE_THERE_S = 0.5
_RELEASE_TIMEOUT_S = 1.0
# Limits of a try to connect: a signal must not wait long for an etcd that never answers, and one that is slow or far
# away must have time to answer.
_FIRST_TRY_S = 0.5
_LONGEST_TRY_S = 2.0
_UNLIMITED_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class JobStore:
    """The open store of a job. server: the etcd that this agent hosts, if any. endpoint: what others write to reach
    it."""

    store: Store
    endpoint: str
    server: HostedEtcd | None = None

    def close(self) -> None:
        self.store.close()
        if self.server is not None:
            self.server.stop()
            shutil.rmtree(self.server.directory, ignore_errors=True)  # its data mean nothing without the job


def open_store(
    config: JobConfig,
    address: str,
    directory: Path,
    interrupted: Callable[[], bool],
    tell: Callable[[str], object] = lambda text: None,
    show: Callable[[str], object] = lambda text: None,
) -> JobStore | None:
    """Returns the connected store; None if `interrupted` became true first.

    directory: for the data of an etcd hosted here. tell(text): reports once that an etcd does not answer yet, and that
    it does at last. show(text): how long it will be waited for, often.

    Raises UserError (a taken port, no etcd to run), StoreUnavailable within join_timeout_s.
    """
    if config.endpoints is None:
        listen = "unix" if config.max_nodes == 1 else joined(address, _free_port(address))
        return _hosted(listen, directory)
    store = Store(store_config(config.endpoints, config.store_credentials))
    if config.hosts_store:
        try:
            return _host(config, store, directory)
        except BaseException:
            store.close()
            raise
    limit_s = _UNLIMITED_S if config.join_timeout_s is None else config.join_timeout_s
    limit = "without limit" if config.join_timeout_s is None else f"for up to {limit_s:g} s"
    deadline_s = time.monotonic() + limit_s
    failed = 0
    try:
        while not interrupted():
            remaining_s = deadline_s - time.monotonic()
            try_s = delay_s(1 + failed, _FIRST_TRY_S, _LONGEST_TRY_S)
            try:
                store.connect(min(try_s, max(round(remaining_s, 2), 0.01)))
            except StoreUnavailable as error:
                if remaining_s <= try_s:
                    raise StoreUnavailable(
                        f"{error} (tried for {limit_s:g} s; --rdzv-conf join_timeout=S changes that)"
                    ) from error
                if not failed:
                    tell(f"{error}; trying {limit} (--rdzv-conf join_timeout=S)")
                failed += 1
                left = "" if config.join_timeout_s is None else f", {max(remaining_s, 0):.0f} s left"
                show(f"waiting for etcd at {','.join(config.endpoints)}{left}")
            else:
                if failed:
                    tell("etcd answers")
                return JobStore(store, ",".join(config.endpoints))
    except BaseException:
        store.close()
        raise
    store.close()
    return None


def known_defect(opened: JobStore) -> str:
    """Returns what the user should know of the release of an etcd that others run; empty if nothing."""
    if opened.server is not None:
        return ""
    try:
        version = opened.store.status(_RELEASE_TIMEOUT_S).version
        return warning(version, len(opened.store.member_names(_RELEASE_TIMEOUT_S)))
    except BaguaError as error:
        # The job needs no answer: an outage is met elsewhere, and etcd 3.6 with users tells its state to root alone.
        log.info("the release of etcd is not known: %s", error)
        return ""


def is_exposed(config: JobConfig) -> bool:
    """Tells whether the store is reached beyond this machine without TLS: worth one warning."""
    if config.endpoints is None:
        return False
    settings = store_config(config.endpoints, config.store_credentials)
    return any(
        not settings.uses_tls(endpoint) and not endpoint.is_this_host for endpoint in settings.endpoints
    )


def _host(config: JobConfig, store: Store, directory: Path) -> JobStore:
    """Returns an etcd at the endpoint: the one that answers there, or one that is started here. Raises UserError."""
    assert config.endpoints is not None
    answers = JobStore(store, ",".join(config.endpoints))
    try:
        store.connect(_IS_ANYONE_THERE_S)
    except StoreUnavailable:
        target = parse_endpoint(config.endpoints[0]).target
    else:
        return answers
    try:
        hosted = _hosted(listening_target(target), directory, target)
    except PortTaken as taken:
        # Another agent of this host may have begun to host it in the same moment.
        try:
            store.connect(START_TIMEOUT_S)
        except StoreUnavailable:
            raise taken from None
        return answers
    store.close()
    return hosted


def _hosted(listen: str, directory: Path, reached_at: str | None = None) -> JobStore:
    """Starts an etcd here and returns it, connected. reached_at: what the others write, if it is not where it
    listens."""
    server = HostedEtcd.start(listen, directory=directory)
    store = Store(store_config((server.endpoint,), StoreCredentials()))  # those of `config` are a cluster's
    try:
        store.connect(START_TIMEOUT_S)
    except BaseException:
        store.close()
        server.stop()
        raise
    return JobStore(store, reached_at or server.endpoint.removeprefix("http://"), server)


def _free_port(address: str) -> int:
    """Returns etcd's own port if it is free, else any other free port."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket(family_of(address)) as probe:
            try:
                probe.bind((address or LOOPBACK, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(f"no TCP port can be taken on {address}; give --local-addr, or --rdzv-endpoint")
