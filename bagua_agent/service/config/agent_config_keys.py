"""The keys of the daemon's configuration file, with their values and defaults.

One table; reading, checking and the example all use it. Defines the range of single values, not how values go together
(agent_config.py).
"""

from __future__ import annotations

import ipaddress
import os.path
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from bagua_agent.base.errors import UserError
from bagua_agent.base.ids import is_id
from bagua_agent.cluster.cluster_policy import DAY_S, ClusterPolicy
from bagua_agent.config.job_config import MAX_LOG_MIB
from bagua_agent.dashboard.listening import Listening
from bagua_agent.metrics.otel_settings import OtelSettings

LONGEST_PATTERN = 100

_ACCOUNT = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,98}[A-Za-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PATTERN = re.compile(r"[A-Za-z_*][A-Za-z0-9_*]*")
_MEMORY = re.compile(r"[1-9][0-9]{0,8}[MGT]|(100|[1-9][0-9]?)%")  # as systemd reads it

Value = bool | int | float | str | tuple[str, ...] | Mapping[str, str]


class WrongValue(UserError):
    """Reports one wrong value of the file. what: what is wrong with it. instead: what to write instead."""

    def __init__(self, what: str, instead: str) -> None:
        super().__init__(what)
        self.what = what
        self.instead = instead


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the file: `section.name`, or `name` at the top of the file. default: None if it must be given. example:
    what the example file gives; it leaves keys without one at their default. read: the checked value, or WrongValue."""

    path: str
    read: Callable[[object], Value]
    default: Value | None
    help: str
    example: Value | None = None

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def field(self) -> str:
        """The name of the key's field in AgentConfig."""
        return self.path.replace(".", "_")


# ---- single values


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise WrongValue("neither true nor false", "true or false, without quotes")
    return value


def text(value: object) -> str:
    if not isinstance(value, str):
        raise WrongValue("not a text", 'a text in quotes, as "x"')
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in value):
        raise WrongValue("a text with control characters", "letters, digits and signs")
    return value


def texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise WrongValue("not a list", 'texts in brackets, as ["x", "y"]')
    return tuple(dict.fromkeys(text(item) for item in value))


def matching(is_one: Callable[[str], object], what: str, instead: str) -> Callable[[object], str]:
    """Returns a reader of texts that accepts those for which is_one is true, and an empty one."""

    def read(value: object) -> str:
        found = text(value)
        if found and not is_one(found):
            raise WrongValue(what, instead)
        return found

    return read


absolute_path = matching(
    lambda path: path.startswith("/") and os.path.normpath(path) == path,
    "not an absolute path in its shortest form",
    "one such as /etc/bagua/tls/key.pem",
)
memory = matching(_MEMORY.fullmatch, "no amount of memory", 'one such as "64G" or "90%", or "" for no limit')
node_name = matching(is_id, "no name of a node", "1 to 100 of A-Z a-z 0-9 . _ -")


def period(unit: str, example: str, least: float, most: float) -> Callable[[object], float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise WrongValue("not a number", f"{unit}, as {example}, without quotes")
        if not least <= value <= most:
            raise WrongValue("no such time", f"{least:g} to {most:g} {unit}")
        return float(value)

    return read


def count(
    least: int, most: int, what: str = "no such number", kind: str = "a whole number"
) -> Callable[[object], int]:
    def read(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise WrongValue(what, f"{kind} from {least} to {most}, without quotes")
        return value

    return read


def slots(value: object) -> int | str:
    if value in ("gpu", "cpu"):
        return str(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise WrongValue(
            "no number of slots", 'a number from 1, "gpu" (one a GPU) or "cpu" (one a processor)'
        )
    return value


def address(value: object) -> str:
    """Reads the address of a particular host, which others use."""
    host = text(value)
    try:
        if not host or not ipaddress.ip_address(host).is_unspecified:
            return host
    except ValueError:
        if _HOST.fullmatch(host):
            return host
        raise WrongValue("no host name or address", "one without port, as 10.0.0.5") from None
    raise WrongValue("no address that others can call", "an address of this node, or leave it out")


def listening(value: object) -> str:
    """Reads the address at which a page is served; an empty text means that none is served."""
    place = str(value) if isinstance(value, int) and not isinstance(value, bool) else text(value)
    try:
        Listening.parse(place)
    except ValueError:
        raise WrongValue("neither a port nor HOST:PORT", 'one such as 7465 or "10.0.0.5:7465"') from None
    return place


def collector(value: object) -> str:
    """Reads the URL of a collector of OpenTelemetry's protocol; an empty text means that there is none."""
    url = text(value)
    try:
        OtelSettings.of(url, {})
        _ = urlsplit(url).port  # raises for a number that no port has
    except ValueError:
        raise WrongValue("no URL of a collector", 'one such as "http://collector:4318"') from None
    return url


def labels(value: object) -> Mapping[str, str]:
    if not isinstance(value, dict):
        raise WrongValue("not a table", 'names and values, as { rack = "r1" }')
    for name, item in value.items():
        if not _LABEL.fullmatch(name) or not isinstance(item, str) or not _LABEL.fullmatch(item):
            raise WrongValue(
                f"{name!r} is no label",
                'names and values of A-Z a-z 0-9 . _ / - in quotes, as { rack = "r1" }',
            )
    return dict(value)


def account(value: object) -> str:
    name = text(value)
    if not _ACCOUNT.fullmatch(name):
        raise WrongValue("no name of an account", "a name that `id` knows, not a number")
    return name


def default_account(value: object) -> str:
    name = account(value)
    if name == "root":
        raise WrongValue(
            "every job that names no user would run as root",
            "an account without rights; jobs.users may list root for jobs that ask for it",
        )
    return name


def accounts(value: object) -> tuple[str, ...]:
    return tuple(account(name) for name in texts(value))


def variable_patterns(value: object) -> tuple[str, ...]:
    patterns = texts(value)
    for pattern in patterns:
        if not _PATTERN.fullmatch(pattern) or len(pattern) > LONGEST_PATTERN:
            raise WrongValue(
                f"{pattern!r} is no name of a variable", 'names in which * is any letters, as "NCCL_*"'
            )
        if not pattern.strip("*"):
            raise WrongValue(f"{pattern!r} allows every variable", 'the names that jobs need, as "NCCL_*"')
    return patterns


# ---- the table


def _key(
    read: Callable[[object], Value], default: Value | None, help: str, example: Value | None = None
) -> Any:
    """Declares a field that is a key of the file; see Key."""
    return field(metadata={"read": read, "default": default, "help": help, "example": example})


@dataclass(frozen=True, slots=True)
class AgentKeys:
    """The keys of the file and their values; `section.key` is the field section_key. An empty text: the key is not
    given."""

    insecure: bool = _key(
        switch,
        False,
        "true lets etcd and this daemon be used beyond this host without TLS and authentication. A client that "
        "reaches either can then run programs on the nodes.",
    )
    etcd_endpoints: tuple[str, ...] = _key(
        texts,
        None,
        "The cluster's etcd: host:port, https://host:port, or unix:/path.",
        example=("etcd-1:2379", "etcd-2:2379", "etcd-3:2379"),
    )
    etcd_ca_file: str = _key(
        absolute_path, "", "Authority that issued etcd's certificates.", example="/etc/bagua/tls/ca.pem"
    )
    etcd_cert_file: str = _key(
        absolute_path,
        "",
        "This node's certificate, role agent; its common name is its user in etcd.",
        example="/etc/bagua/tls/certificate.pem",
    )
    etcd_key_file: str = _key(absolute_path, "", "Its key, mode 0600.", example="/etc/bagua/tls/key.pem")
    etcd_user: str = _key(text, "", "User of an etcd that asks for a password instead of a certificate.")
    etcd_password_file: str = _key(absolute_path, "", "File with that user's password, mode 0600.")
    node_name: str = _key(node_name, "", "This node's name, unlike any other's. Empty: its host name.")
    node_slots: int | str = _key(
        slots, "gpu", 'Workers this node can run: a number, "gpu" (one a GPU) or "cpu" (one a processor).'
    )
    node_labels: Mapping[str, str] = _key(labels, {}, 'What jobs can ask a node to have, as { rack = "r1" }.')
    listen_address: str = _key(
        address,
        "",
        "Host name or address of this node at which the daemon listens, and others call it. Empty: the address "
        "from which this node reaches etcd.",
    )
    listen_port: int = _key(count(1, 65535, "not a port", "a number"), 7461, "Port of the daemon.")
    dashboard_listen: str = _key(
        listening,
        "",
        "Where the daemon serves the page of the cluster, and its metrics: a port of 127.0.0.1, or an address of this "
        "node as HOST:PORT. With the certificates of [tls] over TLS, to holders of a certificate. Empty: nowhere.",
    )
    tls_ca_file: str = _key(
        absolute_path, "", "Authority whose certificates the daemon accepts.", example="/etc/bagua/tls/ca.pem"
    )
    tls_cert_file: str = _key(
        absolute_path, "", "The daemon's own certificate.", example="/etc/bagua/tls/certificate.pem"
    )
    tls_key_file: str = _key(absolute_path, "", "Its key, mode 0600.", example="/etc/bagua/tls/key.pem")
    tls_revoked_file: str = _key(
        absolute_path,
        "",
        "List of certificates that are not accepted any more, since their keys were lost; read again when it changes.",
        example="/etc/bagua/tls/revoked.pem",
    )
    jobs_default_user: str = _key(default_account, "bagua", "Account that runs jobs which name none.")
    jobs_users: tuple[str, ...] = _key(
        accounts,
        (),
        "Further accounts that a job may name. Every operator can run any program as any of them.",
    )
    jobs_environment: tuple[str, ...] = _key(
        variable_patterns,
        ("LANG", "LC_*", "TZ", "PYTHONPATH", "OMP_NUM_THREADS", "CUDA_*", "NCCL_*", "GLOO_*", "TORCH_*"),
        "Variables that a job may set for its workers; * is any letters.",
    )
    jobs_keep_ended: int = _key(
        count(0, 100_000),
        ClusterPolicy().ended_kept_jobs,
        "How many jobs that ended are kept, with their logs; beyond that the longest ended are removed. The node that "
        "schedules decides, so write the same on all nodes.",
    )
    jobs_keep_ended_days: float = _key(
        period("days", "30.0", 0.01, 36_500),
        ClusterPolicy().ended_kept_s / DAY_S,
        "After how many days a job that ended is removed. As above.",
    )
    jobs_max_log_mib: int = _key(
        count(0, 1_000_000),
        MAX_LOG_MIB,
        "How much of each stream (stdout, stderr) of a worker is kept, in MiB: between half of it and all of it, the "
        "newest. 0: everything.",
    )
    jobs_memory_max: str = _key(
        memory,
        "",
        "How much memory one job may use on this node, its agent and all its workers together, as 64G or 90%. Beyond "
        "it the kernel kills processes of that job alone. Empty: no limit. It needs systemd, and holds for jobs that "
        "start from now on.",
    )
    jobs_metrics: bool = _key(
        switch,
        False,
        "true lets each job that starts from now on serve this node's part of its metrics, at a free port of the "
        "address of dashboard.listen and with the same TLS. /targets of the daemon's page lists them for Prometheus.",
    )
    jobs_otel: str = _key(
        collector,
        "",
        "Collector to which jobs that start from now on send this node's part of their metrics, and their events, by "
        "OpenTelemetry's protocol (OTLP), as http://collector:4318. Needs the extra otel. Empty: they send nothing.",
    )
    directories_state: str = _key(
        absolute_path, "/var/lib/bagua", "What must outlive a restart of the daemon."
    )
    directories_log: str = _key(absolute_path, "/var/log/bagua", "Output of the jobs, a directory for each.")
    times_node_lease_s: float = _key(
        period("seconds", "5.0", 2, 3600),
        5.0,
        "How long etcd keeps this node's entry without hearing from the daemon.",
    )
    times_kill_grace_s: float = _key(
        period("seconds", "5.0", 0, 3600),
        ClusterPolicy().kill_grace_s,
        "What a job asked to leave is given beyond its own shutdown timeout, before it is killed.",
    )


KEYS = tuple(Key(f.name.replace("_", ".", 1), **f.metadata) for f in fields(AgentKeys))


def single_machine(account: str, home: str) -> Mapping[str, Value]:
    """Returns the values to write for a cluster of this machine alone, which `account` runs for itself: an etcd on
    loopback, no TLS, a slot for each processor, directories below `home`."""
    state = os.path.join(home, ".bagua")
    # no job may run as root by default, so those that ask for it do
    who: dict[str, Value] = {"jobs.users": ("root",)} if account == "root" else {"jobs.default_user": account}
    return {
        "etcd.endpoints": ("127.0.0.1:2379",),
        "node.slots": "cpu",
        "directories.state": os.path.join(state, "state"),
        "directories.log": os.path.join(state, "log"),
        **who,
    }


def example_config(given: Mapping[str, Value] | None = None) -> str:
    """Returns the text of a whole configuration file: every key with what it means, and, where most nodes leave it so,
    its default as a comment. given: values by path; without it, those of a cluster with TLS, which can be used as they
    are once etcd's hosts are named and the certificates are in place."""
    if given is None:
        given = {key.path: key.example for key in KEYS if key.example is not None}
    lines = ["# Configuration of Bagua's daemon on this node.", ""]
    section = ""
    for key in KEYS:
        if key.section != section:
            section = key.section
            lines += [f"[{section}]", ""]
        lines += textwrap.wrap(key.help, 100, initial_indent="# ", subsequent_indent="# ")
        if key.path in given:
            lines.append(f"{key.name} = {toml(given[key.path])}")
        elif key.default is not None:
            lines.append(f"# {key.name} = {toml(key.default)}")
        lines.append("")
    return "\n".join(lines)


def toml(value: Value) -> str:
    """Returns a value in the notation of the file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    pairs = ", ".join(f"{name} = {toml(item)}" for name, item in value.items())
    return "{ " + pairs + " }" if pairs else "{}"
