"""Decides where the agents meet, and which node starts etcd there.

Pure. Turns torchrun's rendezvous options into endpoints of etcd; each difference from torchrun comes
back as a note. The store defines how endpoints and ids are written.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import STATIC_MASTER_PORT
from bagua_agent.etcd import endpoints as store_endpoints
from bagua_agent.etcd.keys import check_id
from bagua_contract.addresses import joined
from bagua_launch import scalar_values
from bagua_launch.errors import RequestError, refuse
from bagua_launch.node_facts import NodeFacts
from bagua_launch.written_values import Values, WrittenValue

BACKENDS = ("etcd", "etcd-v2", "c10d", "static")

# options that describe a job of several nodes, or this node's place among them
_OF_SEVERAL_NODES = frozenset(
    {"hosts", "nnodes", "sizes", "start_size", "node_rank", "master_addr", "master_port"}
)
# torchrun's own keys, and the field of each; None: accepted for compatibility, ignored
_CONF_KEYS: dict[str, str | None] = {
    "join_timeout": "join_timeout_s",
    "timeout": "join_timeout_s",
    "last_call_timeout": "last_call_s",
    "node_window": "node_window_s",
    "lease_ttl": "lease_ttl_s",
    "probe_window": "probe_window_s",
    "below_minimum_timeout": "below_minimum_timeout_s",
    "holder_timeout": "holder_timeout_s",
    "hang_notice": "hang_notice_s",
    "hang_renew": "hang_renew_s",
    "close_timeout": None,
    "heartbeat_timeout": None,
    "keep_alive_interval": None,
    "keep_alive_max_attempt": None,
    "read_timeout": None,
    "store_type": None,
    "use_libuv": None,
    "rank": None,
}
# torchrun's, of c10d: whether this node hosts the store. Its forms are torchrun's, which are not those of a switch.
IS_HOST = "is_host"
FORMS = {True: ("1", "true", "t", "yes", "y"), False: ("0", "false", "f", "no", "n")}
_MAY_BE_WITHOUT_LIMIT = frozenset({"join_timeout_s", "below_minimum_timeout_s", "holder_timeout_s"})
_ANY_PORT = re.compile(r"[^,]*:0+")
LARGEST_PORT = 65535
_SHORTEST_LEASE_S = 2.0  # etcd grants none shorter


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The place where the agents meet.

    endpoints None: the agent starts an etcd of its own. master_port: the workers' own, of a static rendezvous.
    obeys_is_host: is_host of --rdzv-conf decided hosts_store.
    """

    job_id: str | None
    endpoints: tuple[str, ...] | None
    hosts_store: bool = False
    master_port: int | None = None
    obeys_is_host: bool = False
    notes: tuple[str, ...] = ()


def without_other_nodes(
    typed: Mapping[str, object], values: dict[str, WrittenValue]
) -> dict[str, WrittenValue]:
    """Returns `values`, less what a variable or file says of several nodes where --standalone was typed.

    typed: by key, as click read it. Raises RequestError if --hosts was typed too.
    """
    if not typed.get("standalone"):
        return values
    if typed.get("hosts") is not None:
        raise refuse(values["hosts"], "--standalone is for this node alone", "one of them")
    left_out = {key for key in _OF_SEVERAL_NODES if typed.get(key) is None}
    return {key: written for key, written in values.items() if key not in left_out}


def without_other_etcd(values: Values, max_nodes: int) -> tuple[Values, tuple[str, ...]]:
    """Returns `values` and notes: without BAGUA_ETCD's or launch.toml's etcd if agents meet at a typed --master-addr.

    These name the cluster's etcd, for all commands. PET_RDZV_ENDPOINT stays, because under torchrun it is stronger.
    """
    endpoint, address, backend = map(values.get, ("rdzv_endpoint", "master_addr", "rdzv_backend"))
    if max_nodes == 1 or endpoint is None or address is None or not address.is_typed:
        return values, ()
    credentials = {key: written for key, written in values.items() if key.startswith("etcd_")}
    is_meant = (
        endpoint.where == "PET_RDZV_ENDPOINT"
        or any(written.is_typed for written in (endpoint, *credentials.values()))
        or (backend is not None and backend.text in ("etcd", "etcd-v2"))
    )
    if is_meant:
        return values, ()
    note = (
        f"{endpoint.where} is ignored: {address.where} is where the agents meet; --rdzv-endpoint is stronger"
    )
    left_out = {"rdzv_endpoint", *credentials}
    return {key: written for key, written in values.items() if key not in left_out}, (note,)


def parse_rendezvous(
    values: Values, *, max_nodes: int, node_rank: int | None, node: NodeFacts, is_host: bool | None = None
) -> Rendezvous:
    """Returns the place where the agents meet. Raises RequestError.

    is_host: of --rdzv-conf. The result's job_id None: any id will do, since no other node has to name it.
    """
    if scalar_values.is_on(values, "standalone"):
        if max_nodes > 1:
            raise refuse(values["nnodes"], "--standalone is for one node", "--nnodes 1, or no --standalone")
        ignored = [k for k in ("rdzv_endpoint", "rdzv_id", "rdzv_backend") if k in values]
        notes = tuple(f"--standalone: {values[key].where} is ignored" for key in ignored)
        return Rendezvous(None, None, notes=notes)

    job_id = parse_job_id(values["rdzv_id"]) if "rdzv_id" in values else None
    place = _meeting_place(values, max_nodes, node_rank, node, is_host)
    if job_id is None and place.endpoints is not None and max_nodes > 1:
        # torchrun's default, kept so that its command lines work on several nodes
        note = "no --rdzv-id: the job is called 'none'; jobs that share an etcd need ids of their own"
        return replace(place, job_id="none", notes=(*place.notes, note))
    return replace(place, job_id=job_id)


def _meeting_place(
    values: Values, max_nodes: int, node_rank: int | None, node: NodeFacts, is_host: bool | None
) -> Rendezvous:
    endpoint = values.get("rdzv_endpoint")
    written = values.get("rdzv_backend")
    if (
        endpoint
        and max_nodes == 1
        and written
        and written.text == "c10d"
        and _ANY_PORT.fullmatch(endpoint.text)
    ):
        # torchrun's way to run several jobs on one node: any port that is free
        note = f"{endpoint.where} {endpoint.text}: the workers of this node meet in an etcd that this node starts"
        return Rendezvous(None, None, notes=(note,))
    endpoints = parse_endpoints(endpoint) if endpoint else None
    if written is not None and written.text not in BACKENDS:
        raise refuse(written, "no such backend", " or ".join(BACKENDS))
    backend = written.text if written else "etcd"
    label = f"{written.where} {backend}" if written else ""
    is_host = is_host if backend == "c10d" else None

    if endpoints is None and "master_addr" in values and max_nodes > 1:
        label = label or values["master_addr"].where
        return _at_master(values, label, node_rank, node, is_host)
    if backend in ("etcd", "etcd-v2") or endpoints is None or len(endpoints) > 1:
        notes: tuple[str, ...] = ()
        if backend != "etcd":
            where = "the etcd at the endpoint" if endpoints else "an etcd that this node starts"
            notes = (f"{label}: the agents meet in {where}, over its v3 interface",)
        return Rendezvous(None, endpoints, notes=notes)
    # c10d or static: torchrun starts the store on the node that owns the endpoint's address
    owns = node.owns_address(host_of(endpoints[0]))
    hosts = owns if is_host is None else is_host
    note = _hosting_note(label, endpoints[0], hosts, owns)
    return Rendezvous(None, endpoints, hosts, obeys_is_host=is_host is not None, notes=(note,))


def _at_master(
    values: Values, label: str, node_rank: int | None, node: NodeFacts, is_host: bool | None
) -> Rendezvous:
    address = values["master_addr"]
    written = values.get("master_port")
    port = STATIC_MASTER_PORT if written is None else scalar_values.port_or_any(written)
    if written is not None and port == 0:
        raise refuse(
            written, "the nodes meet beside this port, so all must know it", "a number from 1 to 65535"
        )
    host = address.text.strip("[]")
    # The port itself is the workers': a script may name it. Every node finds etcd beside it.
    beside = port + 1 if port < LARGEST_PORT else port - 1
    endpoint = joined(host, beside)
    endpoints = parse_endpoints(WrittenValue(endpoint, address.where))
    owns = node.owns_address(host)
    is_first = owns if node_rank is None else node_rank == 0
    hosts = is_first if is_host is None else is_host
    note = _hosting_note(label, endpoint, hosts, owns)
    return Rendezvous(None, endpoints, hosts, port, obeys_is_host=is_host is not None, notes=(note,))


def _hosting_note(label: str, endpoint: str, hosts: bool, owns: bool) -> str:
    """Returns the note on where etcd runs. owns: the endpoint's host is an address of this node."""
    who = "this node starts" if hosts else "another node starts"
    note = f"{label}: the agents meet in an etcd that {who} at {endpoint}"
    if hosts and not owns:  # a mistyped address, or one that is translated on the way
        note += (
            ". That is no address of this node, so the etcd listens at every address here; other nodes must reach it "
            "at that one"
        )
    return note


def parse_job_id(written: WrittenValue) -> str:
    """Returns the job's id. Raises RequestError for an id that no key in etcd may have."""
    try:
        return check_id("job", written.text)
    except UserError as error:
        raise RequestError(f"{written.where}: {error}") from error


def parse_endpoints(written: WrittenValue) -> tuple[str, ...]:
    """Returns endpoints with their ports, as `bagua_agent.etcd` reads them. Raises RequestError."""
    try:
        return tuple(str(endpoint) for endpoint in store_endpoints.parse_endpoints(written.text))
    except UserError as error:
        raise RequestError(f"{written.where}: {error}") from error


def wants_tls(endpoint: str) -> bool:
    return endpoint.startswith("https://")


def host_of(endpoint: str) -> str:
    return endpoint.rpartition("://")[2].rpartition(":")[0].strip("[]")


@dataclass(frozen=True, slots=True)
class Waits:
    """The values of --rdzv-conf.

    fields: JobConfig's, by name. without_effect: keys of torchrun without meaning here. is_host: None if absent.
    """

    fields: dict[str, float | None] = field(default_factory=dict)
    without_effect: tuple[str, ...] = ()
    is_host: bool | None = None


def parse_conf(written: WrittenValue) -> Waits:
    """Parses --rdzv-conf. Raises RequestError naming the key and the known ones."""
    fields: dict[str, float | None] = {}
    without_effect = []
    is_host = None
    # Quotes that a batch script passes on literally are no part of the keys, as torchrun has it.
    for part in filter(None, (part.strip().strip("\"'") for part in written.text.split(","))):
        key, equals, text = (piece.strip().strip("\"'") for piece in part.partition("="))
        if not equals or not key or not text:
            raise refuse(written, f"{part!r} is not KEY=VALUE", "key=value,key=value")
        if key == IS_HOST:
            is_host = _is_host(written, text)
            continue
        if key not in _CONF_KEYS:
            known = ", ".join([*(k for k, name in _CONF_KEYS.items() if name), IS_HOST])
            raise refuse(written, f"unknown key {key!r}", known)
        name = _CONF_KEYS[key]
        if name is None:
            without_effect.append(key)
        else:
            fields[name] = _seconds(written, key, text, name)
    return Waits(fields, tuple(without_effect), is_host)


def _is_host(written: WrittenValue, text: str) -> bool:
    for value, forms in FORMS.items():
        if text.lower() in forms:
            return value
    raise refuse(written, f"{IS_HOST} {text!r} is neither yes nor no", f"{IS_HOST}=1 or {IS_HOST}=0")


def _seconds(written: WrittenValue, key: str, text: str, name: str) -> float | None:
    if text.lower() == "none" and name in _MAY_BE_WITHOUT_LIMIT:
        return None
    least = _SHORTEST_LEASE_S if name == "lease_ttl_s" else 0.0
    bound = f"at least {least:g}" if least else "more than 0"
    instead = f"{key}=SECONDS, {bound}" + (", or none" if name in _MAY_BE_WITHOUT_LIMIT else "")
    try:
        seconds = float(text)
    except ValueError:
        raise refuse(written, f"{key} {text!r} is not a number", instead) from None
    if not (seconds >= least and 0 < seconds < float("inf")):
        raise refuse(written, f"{key} {text!r} is out of range", instead)
    return seconds
