"""Where is this job's store: given, hosted here for others, or private to this node?"""

from __future__ import annotations

import ipaddress
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.errors import StoreUnavailable, UserError
from bagua_agent.job_config import JobConfig
from bagua_agent.node.local_address import LOOPBACK
from bagua_agent.store.client import Store
from bagua_agent.store.endpoints import DEFAULT_PORT, Endpoint, parse_endpoint
from bagua_agent.store.hosted import HostedEtcd
from bagua_agent.store_access import store_config

_IS_ANYONE_THERE_S = 0.5
_LOOK_UP_EVERY_S = 0.5  # while connecting: a signal must not wait for an etcd that never answers
_UNLIMITED_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class JobStore:
    """server: the etcd that this agent hosts, if any. endpoint: what others write to reach it."""

    store: Store
    endpoint: str
    server: HostedEtcd | None = None

    def close(self) -> None:
        self.store.close()
        if self.server is not None:
            self.server.stop()
            shutil.rmtree(self.server.directory, ignore_errors=True)  # its data mean nothing without the job


def open_store(
    config: JobConfig, address: str, directory: Path, interrupted: Callable[[], bool]
) -> JobStore | None:
    """Connected; None if `interrupted` became true first. directory: for the data of an etcd hosted here.

    Raises UserError (a taken port, no etcd to run), StoreUnavailable within join_timeout_s.
    """
    if config.endpoints is None:
        listen = "unix" if config.max_nodes == 1 else f"{address}:{_free_port(address)}"
        return _hosted(config, listen, directory)
    store = Store(store_config(config.endpoints, config.store_credentials))
    if config.hosts_store:
        try:
            store.connect(_IS_ANYONE_THERE_S)
        except StoreUnavailable:
            store.close()
            return _hosted(config, parse_endpoint(config.endpoints[0]).target, directory)
        return JobStore(store, ",".join(config.endpoints))
    limit_s = _UNLIMITED_S if config.join_timeout_s is None else config.join_timeout_s
    deadline_s = time.monotonic() + limit_s
    try:
        while not interrupted():
            remaining_s = deadline_s - time.monotonic()
            try:
                store.connect(min(_LOOK_UP_EVERY_S, max(remaining_s, 0.01)))
            except StoreUnavailable as error:
                if remaining_s <= _LOOK_UP_EVERY_S:
                    raise StoreUnavailable(
                        f"{error} (tried for {limit_s:g} s; --rdzv-conf join_timeout=S changes that)"
                    ) from error
            else:
                return JobStore(store, ",".join(config.endpoints))
    except BaseException:
        store.close()
        raise
    store.close()
    return None


def is_exposed(config: JobConfig) -> bool:
    """Whether the store is reached beyond this machine without TLS: worth one warning."""
    if config.endpoints is None:
        return False
    settings = store_config(config.endpoints, config.store_credentials)
    return any(
        not endpoint.is_unix and not settings.uses_tls(endpoint) and not _is_this_machine(endpoint)
        for endpoint in settings.endpoints
    )


def _is_this_machine(endpoint: Endpoint) -> bool:
    host = endpoint.target.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _hosted(config: JobConfig, listen: str, directory: Path) -> JobStore:
    server = HostedEtcd.start(listen, directory=directory)
    store = Store(store_config((server.endpoint,), config.store_credentials))
    try:
        store.connect(_IS_ANYONE_THERE_S)
    except BaseException:
        store.close()
        server.stop()
        raise
    return JobStore(store, server.endpoint.removeprefix("http://"), server)


def _free_port(address: str) -> int:
    """etcd's own port if nobody has it, else any that is free now."""
    for port in (DEFAULT_PORT, 0):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address or LOOPBACK, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise UserError(f"no TCP port can be taken on {address}; give --local-addr, or --rdzv-endpoint")
