"""Reads the TOML file of a node's daemon and checks it as a whole: an AgentConfig is valid.

`check` is pure; `read_agent_config` reads the file, and checks the files that it names and the packages that it needs.
Each error is one line with the key, the value and what to do. Single values and the defaults: agent_config_keys.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import stat
import tomllib
from collections.abc import Mapping
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bagua_agent.base.errors import UserError
from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.config.job_config import StoreCredentials
from bagua_agent.dashboard.listening import Listening
from bagua_agent.etcd.endpoints import Endpoint, parse_endpoint
from bagua_agent.metrics.otel_settings import OTEL_MODULES
from bagua_agent.security.certificate_files import (
    TlsFiles,
    check_pair,
    read_certificates,
    read_tls,
    secret_file_trouble,
)
from bagua_agent.service.config.agent_config_keys import KEYS, AgentKeys, Key, Value, WrongValue, node_name
from bagua_contract.addresses import is_loopback
from bagua_contract.distribution import DISTRIBUTION

DEFAULT_PATH = "/etc/bagua/agent.toml"


class AgentConfig(AgentKeys):
    """The checked configuration of a daemon: the values of a valid file."""

    __slots__ = ()

    @property
    def store_credentials(self) -> StoreCredentials:
        return StoreCredentials(
            ca_file=self.etcd_ca_file or None,
            cert_file=self.etcd_cert_file or None,
            key_file=self.etcd_key_file or None,
            user=self.etcd_user or None,
            password_file=self.etcd_password_file or None,
        )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The TLS files of the daemon's own service; None if it is used without TLS."""
        if not self.tls_cert_file:
            return None
        return TlsFiles(self.tls_ca_file, self.tls_cert_file, self.tls_key_file, self.tls_revoked_file)

    @property
    def cluster_policy(self) -> ClusterPolicy:
        """The policy by which this daemon, and the scheduler in it, decide."""
        return ClusterPolicy(
            kill_grace_s=self.times_kill_grace_s,
            ended_kept_jobs=self.jobs_keep_ended,
            ended_kept_s=self.jobs_keep_ended_days * DAY_S,
        )

    def may_run_as(self, account: str) -> bool:
        return account == self.jobs_default_user or account in self.jobs_users

    def may_set(self, variable: str) -> bool:
        """Tells whether a job may set this variable for its workers."""
        return any(_matches(variable, pattern) for pattern in self.jobs_environment)


def check(content: Mapping[str, object], where: str, host_name: str) -> AgentConfig:
    """Returns the configuration that a file's `content` holds. where: the file, for complaints. Raises UserError.
    Pure."""
    said = _flattened(content, where)
    values: dict[str, Any] = {key.field: _value(key, said, where) for key in KEYS}
    if not values["node_name"]:
        try:
            values["node_name"] = node_name(host_name)
        except WrongValue as error:
            raise UserError(
                f"{where}: node.name is not given, and host name {host_name!r} is {error}; set one"
            ) from error
    config = AgentConfig(**values)
    complaint = _complaint(config)
    if complaint is not None:
        raise UserError(f"{where}: {complaint}")
    return config


def read_agent_config(path: str, now: datetime) -> AgentConfig:
    """Reads and checks the file, and the certificates and secrets that it names. now: in UTC.

    Raises UserError.
    """
    file = Path(path)
    try:
        content = file.read_bytes()
        status = file.stat()
    except OSError as error:
        raise UserError(
            f"{path!r} can't be read: {error.strerror or error}; name a readable TOML file"
        ) from error
    mode = stat.S_IMODE(status.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(
            f"{path!r} can be written by others (mode {mode:04o}), who could run programs here; chmod 644 it"
        )
    if status.st_uid not in (0, os.geteuid()):
        raise UserError(
            f"{path!r} belongs to user {status.st_uid}, who could run programs here; chown root it"
        )
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}; write TOML such as port = 7461") from error
    config = check(table, path, socket.gethostname())
    check_named_files(config, path, now)
    check_packages(config, path)
    return config


def check_named_files(config: AgentConfig, where: str, now: datetime) -> None:
    """Checks the files that the configuration names. Raises UserError if a certificate is not valid or has another key,
    or if a secret is open to others."""
    try:
        if config.etcd_password_file:
            trouble = secret_file_trouble(Path(config.etcd_password_file))
            if trouble is not None:
                raise UserError(f"{config.etcd_password_file!r}: {trouble}")
        if config.etcd_ca_file:
            read_certificates(Path(config.etcd_ca_file), "CA file")
        if config.etcd_cert_file:
            check_pair(config.etcd_cert_file, config.etcd_key_file, now)
    except UserError as error:
        raise UserError(f"{where}: etcd: {error}") from error
    if config.tls_files is not None:
        try:
            read_tls(config.tls_files, now)
        except UserError as error:
            raise UserError(f"{where}: tls: {error}") from error


def check_packages(config: AgentConfig, where: str) -> None:
    """Checks that the packages are installed that the configuration needs. Raises UserError if a key needs an extra
    that is not installed."""
    if config.jobs_otel and not all(map(_is_installed, OTEL_MODULES)):
        raise UserError(
            f"{where}: jobs.otel {config.jobs_otel!r} needs OpenTelemetry's exporter, which is not installed; "
            f"pip install '{DISTRIBUTION}[otel]', or leave it out"
        )


def _is_installed(module: str) -> bool:
    """Tells whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _flattened(content: Mapping[str, object], where: str) -> dict[str, object]:
    """Returns the values of the file by path. Raises UserError for unknown keys."""
    sections = {key.section for key in KEYS if key.section}
    said: dict[str, object] = {}
    for name, value in content.items():
        if name not in sections:
            said[name] = value
            continue
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} {value!r} is not a section; write [{name}] with its keys below")
        said |= {f"{name}.{key}": item for key, item in value.items()}
    known = [key.path for key in KEYS]
    for path, value in said.items():
        if path not in known:
            near = get_close_matches(path, known, n=2) or [k for k in known if k.rpartition(".")[2] == path]
            use = " or ".join(near) or f"one of {', '.join(known)}"
            raise UserError(f"{where}: {path} {_shown(value)}: there is no such key; use {use}")
    return said


def _value(key: Key, said: Mapping[str, object], where: str) -> Value:
    if key.path not in said:
        if key.default is None:
            raise UserError(f"{where}: {key.path} is missing; write it: {key.help}")
        return key.default
    value = said[key.path]
    try:
        return key.read(value)
    except WrongValue as error:
        raise UserError(f"{where}: {key.path} {_shown(value)}: {error.what}; use {error.instead}") from error


def _complaint(config: AgentConfig) -> str | None:
    """Returns a complaint about values that contradict each other or leave the daemon open to anyone; None if there is
    none."""
    if not config.etcd_endpoints:
        return "etcd.endpoints [] is empty; name at least one, as etcd-1:2379"
    try:
        endpoints = tuple(parse_endpoint(entry) for entry in config.etcd_endpoints)
    except UserError as error:
        return f"etcd.endpoints: {error}; mend this entry"
    return (
        _incomplete(config)
        or _exposed_etcd(config, endpoints)
        or _exposed_daemon(config, endpoints)
        or _exposed_dashboard(config)
        or next(
            (
                f"directories.{name} '' is empty; name a directory, or leave it out"
                for name in ("state", "log")
                if not getattr(config, f"directories_{name}")
            ),
            None,
        )
    )


_NEEDS = (  # a key, and another without which it is of no use
    ("etcd.cert_file", "etcd.key_file"),
    ("etcd.key_file", "etcd.cert_file"),
    ("etcd.user", "etcd.password_file"),
    ("etcd.password_file", "etcd.user"),
    ("tls.cert_file", "tls.key_file"),
    ("tls.cert_file", "tls.ca_file"),
    ("tls.key_file", "tls.cert_file"),
    ("tls.ca_file", "tls.cert_file"),
    ("tls.revoked_file", "tls.cert_file"),
    ("jobs.metrics", "dashboard.listen"),
)


def _incomplete(config: AgentConfig) -> str | None:
    given = {key.path: getattr(config, key.field) for key in KEYS}
    for path, other in _NEEDS:
        if given[path] and not given[other]:
            return f"{path} {given[path]!r} is of no use without {other}; give both"
    return None


def _exposed_etcd(config: AgentConfig, endpoints: tuple[Endpoint, ...]) -> str | None:
    with_tls = bool(config.etcd_ca_file or config.etcd_cert_file)
    for endpoint in endpoints:
        plain = endpoint.tls is False or (endpoint.tls is None and not with_tls)
        if plain and with_tls and not endpoint.is_unix:
            return f"etcd.endpoints {str(endpoint)!r} is plain, but etcd's certificates are given; write https://"
        if endpoint.is_this_host or config.insecure:
            continue
        if plain:
            return (
                f"etcd.endpoints {str(endpoint)!r} is plain and beyond this host, and any client of etcd can run "
                f"programs on the nodes; give etcd.ca_file, etcd.cert_file and etcd.key_file, or say insecure = true"
            )
        if not config.etcd_cert_file and not config.etcd_user:
            return (
                f"etcd.endpoints {str(endpoint)!r} lets every client in if it asks for no certificate; give "
                f"etcd.cert_file and etcd.key_file (or etcd.user and etcd.password_file), or say insecure = true"
            )
    return None


def _exposed_daemon(config: AgentConfig, endpoints: tuple[Endpoint, ...]) -> str | None:
    if config.tls_files is not None or config.insecure:
        return None
    if config.listen_address:
        if is_loopback(config.listen_address):
            return None
        place = f"listen.address {config.listen_address!r} is"
    else:
        if all(endpoint.is_this_host for endpoint in endpoints):
            return None
        place = "listen.address is not given, so the daemon listens"
    return (
        f"{place} beyond this host, and any caller of the daemon runs programs here; give tls.ca_file, tls.cert_file "
        f"and tls.key_file, or say insecure = true"
    )


def _exposed_dashboard(config: AgentConfig) -> str | None:
    if not config.dashboard_listen or config.tls_files is not None or config.insecure:
        return None
    if is_loopback(Listening.parse(config.dashboard_listen).host):
        return None
    return (
        f"dashboard.listen {config.dashboard_listen!r} is beyond this host, and the page shows the output of all jobs; "
        "give tls.ca_file, tls.cert_file and tls.key_file, use a port alone, which is one of 127.0.0.1, or say "
        "insecure = true"
    )


def _matches(variable: str, pattern: str) -> bool:
    """Tells whether a variable matches a pattern, in which `*` is any letters and everything else stands for itself."""
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), variable) is not None


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."
