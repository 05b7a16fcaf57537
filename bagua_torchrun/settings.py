"""Reads torchrun's rendezvous options. Pure.

`--rdzv-endpoint` lists etcd's endpoints. `--rdzv-conf` takes the certificates under the names that torch's `etcd-v2`
backend uses, so a command line only changes its backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from urllib.parse import quote

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.client import StoreConfig
from bagua_agent.etcd.endpoints import Endpoint, parse_endpoints

PREFIX = "/bagua/torchrun/v1/"
DEFAULT_TTL_S = 7200  # that of torch's etcd-v2 backend
DEFAULT_READ_TIMEOUT_S = 60  # likewise; it outlasts a restart of etcd
NO_RUN_ID = "none"  # what torchrun passes without --rdzv-id; all such runs on one etcd would be the same run

# torch's defaults keep a dead node for 15 s and wait 30 s for further nodes after the least number has come.
OURS = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3, "last_call_timeout": 5}

OF_ETCD = ("ca_cert", "ssl_cert", "ssl_cert_key", "protocol", "user", "password", "read_timeout", "ttl")
OF_TORCH = (*OURS, "join_timeout", "close_timeout", "heartbeat_timeout")
UNUSED = (
    "timeout",
    "is_host",
    "store_type",
    "rank",
)  # torchrun adds the first; the others are of its other backends


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run.

    store: how to reach etcd. prefix: of this run's keys. ttl_s: how long keys outlive the last agent.
    """

    store: StoreConfig
    prefix: str
    ttl_s: int

    @property
    def state_key(self) -> str:
        return f"{self.prefix}state"

    @property
    def store_prefix(self) -> str:
        return f"{self.prefix}store/"


def parse(endpoint: str, run_id: str, conf: Mapping[str, object]) -> Settings:
    """Returns the settings of a run. Raises UserError naming the option.

    endpoint: of `--rdzv-endpoint`; several are separated by commas.
    conf: of `--rdzv-conf`: ca_cert, ssl_cert and ssl_cert_key (PEM files), protocol (http or https), user and password,
    ttl and read_timeout (s), and torch's own.
    """
    if not endpoint:
        raise UserError("--rdzv-endpoint is missing; write for instance --rdzv-endpoint etcd-1:2379")
    if run_id in ("", NO_RUN_ID):
        raise UserError("--rdzv-id is missing; give all nodes of a job the same one")
    for name in conf:
        if name not in (*OF_ETCD, *OF_TORCH, *UNUSED):
            use = get_close_matches(name, (*OF_ETCD, *OF_TORCH), 1) or sorted((*OF_ETCD, *OF_TORCH))
            raise UserError(f"--rdzv-conf {name} is not known; use {', '.join(use)}")
    store = StoreConfig(
        endpoints=_with_protocol(parse_endpoints(endpoint), conf.get("protocol")),
        ca_cert=_text(conf, "ca_cert"),
        cert=_text(conf, "ssl_cert"),
        key=_text(conf, "ssl_cert_key"),
        user=_text(conf, "user"),
        password=_text(conf, "password"),
        request_timeout_s=_seconds(conf, "read_timeout", DEFAULT_READ_TIMEOUT_S),
    )
    return Settings(store, f"{PREFIX}{quote(run_id, safe='')}/", _seconds(conf, "ttl", DEFAULT_TTL_S))


def _with_protocol(endpoints: tuple[Endpoint, ...], protocol: object) -> tuple[Endpoint, ...]:
    """Returns the endpoints, those without a scheme with that of torch's setting. None: as certificates say."""
    if protocol is None:
        return endpoints
    wanted = str(protocol).strip().lower()
    if wanted not in ("http", "https"):
        raise UserError(f"--rdzv-conf protocol={protocol} is neither http nor https")
    tls = wanted == "https"
    for endpoint in endpoints:
        if endpoint.tls not in (None, tls) and not endpoint.is_unix:
            raise UserError(f"--rdzv-conf protocol={wanted}, but endpoint {str(endpoint)!r} is not {wanted}")
    return tuple(replace(one, tls=tls) if one.tls is None else one for one in endpoints)


def _text(conf: Mapping[str, object], name: str) -> str | None:
    value = conf.get(name)
    return None if value is None else str(value)


def _seconds(conf: Mapping[str, object], name: str, default: int) -> int:
    value = conf.get(name, default)
    try:
        seconds = int(str(value))
    except ValueError:
        seconds = 0
    if seconds < 1:
        raise UserError(f"--rdzv-conf {name}={value} is not a whole number of seconds above 0")
    return seconds
