"""Turns a person's request into a checked JobConfig.

Pure: `parse_request` turns the given values into a JobConfig with notes, or raises one RequestError.
Values that are not given keep JobConfig's defaults; there are none here. `NodeFacts` provides the
facts of the node.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bagua_agent.config.job_config import (
    DEFAULT_SIGNALS,
    MOST_VIRTUAL_SHARDS,
    VIRTUAL_SHARDS,
    CommandKind,
    JobConfig,
    StoreCredentials,
    WorkerCommand,
    workers_of_a_replica,
)
from bagua_launch import scalar_values
from bagua_launch.autotune_request import parse_autotune
from bagua_launch.errors import ETCD_MISSING, RequestError, refuse
from bagua_launch.node_facts import NodeFacts, ThisNode
from bagua_launch.rendezvous_request import (
    IS_HOST,
    Rendezvous,
    Waits,
    parse_conf,
    parse_endpoints,
    parse_job_id,
    parse_rendezvous,
    wants_tls,
    without_other_etcd,
)
from bagua_launch.replica_request import check_replicas, parse_replica_size
from bagua_launch.size_request import parse_size_policy
from bagua_launch.written_values import Values, WrittenValue

_NNODES = re.compile(r"([0-9]{1,9})(?::([0-9]{1,9}))?")
_WITHOUT_EFFECT = ("event_log_handler", "logs_specs", "monitor_interval")
# torch's own, whose place ours take
_LOGS_SPECS, _EVENT_LOG_HANDLERS = ("default",), ("null", "console", "dynamic_rendezvous")


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A request that is possible: `config` for the agent, `notes` for the person, each one line."""

    config: JobConfig
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """A request of `bagua-launch scale` to a job that runs elsewhere."""

    endpoints: tuple[str, ...]
    credentials: StoreCredentials
    job_id: str
    min_nodes: int
    max_nodes: int


def parse_request(values: Values, program: Sequence[str], node: NodeFacts | None = None) -> JobRequest:
    """Returns the job that `values` and `program` (script and its arguments) describe. Raises RequestError."""
    node = node or ThisNode()
    fields, waits = parse_job_fields(values, program)
    if "nproc_per_node" in values:
        fields["slots"] = parse_slots(values["nproc_per_node"], node)
    if "signals_to_handle" not in values and node.ignores("SIGHUP"):
        # Under nohup. SIGINT not: a shell script ignores it for every program in the background, and --hosts and
        # bagua.launch() stop a job by it.
        fields["signals_to_handle"] = tuple(name for name in DEFAULT_SIGNALS if name != "SIGHUP")
    values, left_out = without_other_etcd(values, fields.get("max_nodes", 1))
    place = parse_rendezvous(
        values,
        max_nodes=fields.get("max_nodes", 1),
        node_rank=fields.get("node_rank"),
        node=node,
        is_host=waits.is_host,
    )
    given = (
        values if place.endpoints else {k: written for k, written in values.items() if k != "rdzv_endpoint"}
    )
    fields["store_credentials"] = parse_credentials(given)
    if place.master_port is not None:
        fields["master_addr"], fields["master_port"] = None, place.master_port
    config = JobConfig(
        job_id=place.job_id or f"job-{secrets.token_hex(4)}",
        endpoints=place.endpoints,
        hosts_store=place.hosts_store,
        **fields,
    )
    check_replicas(values, config, config.slots)
    check_one_worker_a_replica(config)
    _check_local_ranks(values, config)
    return JobRequest(config, left_out + _notes(values, place, waits))


def parse_job_fields(values: Values, program: Sequence[str]) -> tuple[dict[str, Any], Waits]:
    """Returns the given fields of JobConfig that do not depend on the node, and the waits. Raises RequestError."""
    fields: dict[str, Any] = {"command": parse_command(values, program)}
    if "nnodes" in values:
        fields["min_nodes"], fields["max_nodes"] = parse_nodes(values["nnodes"])
    fields["size_policy"] = parse_size_policy(values, fields.get("min_nodes", 1), fields.get("max_nodes", 1))
    if "replica_size" in values:
        fields["replica_size"] = parse_replica_size(values["replica_size"])
    for key, (name, parse) in _PLAIN.items():
        if key in values:
            fields[name] = parse(values[key])
    if shards := parse_virtual_shards(values):
        fields["virtual_shards"] = shards
        if fields["command"].kind is CommandKind.EXECUTABLE:
            raise RequestError(
                "--deterministic with --no-python: it needs a Python script or module; use one of them"
            )
    fields.update(parse_autotune(values))
    if fields.get("autotune_level") and fields.get("virtual_shards"):
        raise RequestError(
            "--autotune-level with --deterministic: one order of sums makes its result, so there is nothing to tune; "
            "use one of them"
        )
    waits = parse_conf(values["rdzv_conf"]) if "rdzv_conf" in values else Waits()
    fields.update(waits.fields)
    return fields, waits


def parse_scale(values: Values, words: Sequence[str]) -> ScaleRequest:
    """Returns the request of `scale`. words: the job, unless an option names it, and its nodes. Raises RequestError."""
    endpoint = values.get("rdzv_endpoint")
    if endpoint is None:
        raise RequestError(f"scale: {ETCD_MISSING}")
    if len(words) > 2:
        raise RequestError(f"scale: {' '.join(words)!r} is too much; use scale JOB MIN:MAX")
    job = WrittenValue(words[0], "JOB") if len(words) == 2 else values.get("rdzv_id")
    if job is None:
        raise RequestError(f"scale: which job has {words[0]!r} nodes is missing; use scale JOB MIN:MAX")
    min_nodes, max_nodes = parse_nodes(WrittenValue(words[-1], "MIN:MAX"))
    return ScaleRequest(
        parse_endpoints(endpoint),
        parse_credentials(values),
        parse_job_id(job),
        min_nodes,
        max_nodes,
    )


def parse_nodes(written: WrittenValue) -> tuple[int, int]:
    match = _NNODES.fullmatch(written.text)
    if match is None:
        raise refuse(written, "not a number of nodes", "N, or MIN:MAX such as 2:8")
    least, most = int(match[1]), int(match[2] or match[1])
    if least < 1:
        raise refuse(written, "a job has at least one node", "N, or MIN:MAX such as 1:8")
    if least > most:
        raise refuse(written, "the least is more than the most", f"MIN:MAX such as {most}:{least}")
    return least, most


def parse_slots(written: WrittenValue, node: NodeFacts) -> int:
    if re.fullmatch(r"[1-9][0-9]{0,5}", written.text):
        return int(written.text)
    if written.text == "cpu":
        return node.cpu_count()
    if written.text in ("gpu", "auto"):
        gpus = node.gpu_count()
        if not gpus and written.text == "gpu":
            raise refuse(written, "no GPU is visible on this node", "a number, cpu or auto")
        return gpus or node.cpu_count()
    raise refuse(written, "not a number of workers", "a number from 1 on, auto, cpu or gpu")


def parse_command(values: Values, program: Sequence[str]) -> WorkerCommand:
    if not program:
        raise RequestError("no script; use bagua-launch [OPTIONS] SCRIPT [ARGUMENTS], or --help")
    module, no_python, run_path = (
        scalar_values.is_on(values, k) for k in ("module", "no_python", "run_path")
    )
    if module and no_python:
        raise RequestError("--module with --no-python: a module needs python; use one of them")
    if module and run_path:
        raise RequestError("--module with --run-path: one names a module, the other a file; use one of them")
    kind = CommandKind.SCRIPT
    if module:
        kind = CommandKind.MODULE
    elif run_path:  # as torchrun: stronger than --no-python
        kind = CommandKind.RUN_PATH
    elif no_python:
        kind = CommandKind.EXECUTABLE
    return WorkerCommand(kind, program[0], tuple(program[1:]))


def parse_virtual_shards(values: Values) -> int:
    """Returns the virtual shards of a deterministic job; 0 for any other. Raises RequestError."""
    written = values.get("virtual_shards")
    if not scalar_values.is_on(values, "deterministic"):
        if written is not None:
            raise refuse(written, "only a deterministic job has virtual shards", "--deterministic with it")
        return 0
    if written is None:
        return VIRTUAL_SHARDS
    shards = scalar_values.count(written)
    if not 1 <= shards <= MOST_VIRTUAL_SHARDS:
        raise refuse(written, "not a number of virtual shards", f"1 to {MOST_VIRTUAL_SHARDS}")
    return shards


def check_one_worker_a_replica(config: JobConfig) -> None:
    """Checks that the replicas of a deterministic job have one worker each. Raises RequestError."""
    if config.virtual_shards and workers_of_a_replica(config) > 1:
        raise RequestError(
            f"--deterministic with --replica-size {workers_of_a_replica(config)}: the workers of a replica reduce "
            "among themselves, in an order that is not the shards'; use one of them"
        )


def parse_credentials(values: Values) -> StoreCredentials:
    given = {key: written.text for key, written in values.items() if key.startswith("etcd_")}
    for one, other in (
        ("etcd_cert", "etcd_key"),
        ("etcd_key", "etcd_cert"),
        ("etcd_user", "etcd_password_file"),
        ("etcd_password_file", "etcd_user"),
    ):
        if one in given and other not in given:
            flag = "--" + other.replace("_", "-")
            raise RequestError(f"{values[one].where} {given[one]!r}: only one of a pair; use {flag} with it")
    endpoint = values.get("rdzv_endpoint")
    if endpoint and "etcd_ca" not in given and any(map(wants_tls, parse_endpoints(endpoint))):
        raise refuse(endpoint, "https, and nothing to check etcd's certificate with", "--etcd-ca FILE")
    return StoreCredentials(
        given.get("etcd_ca"),
        given.get("etcd_cert"),
        given.get("etcd_key"),
        given.get("etcd_user"),
        given.get("etcd_password_file"),
    )


# option's key: (JobConfig's field, parser)
_PLAIN: dict[str, tuple[str, Callable[[WrittenValue], Any]]] = {
    "max_restarts": ("max_restarts", scalar_values.count),
    "once": ("once", scalar_values.switch),
    "role": ("role", scalar_values.text),
    "start_method": ("start_method", scalar_values.choice("warm", "spawn", "fork", "forkserver")),
    "signals_to_handle": ("signals_to_handle", scalar_values.signals),
    "shutdown_timeout": ("shutdown_timeout_s", scalar_values.seconds),
    "hang_timeout": ("hang_timeout_s", scalar_values.seconds_or_never),
    "numa_binding": ("numa_binding", scalar_values.choice("node", "socket", "exclusive", "core-complex")),
    "virtual_local_rank": ("virtual_local_rank", scalar_values.switch),
    "log_dir": ("log_dir", scalar_values.text),
    "max_log_mib": ("max_log_mib", scalar_values.count),
    "redirects": ("redirects", scalar_values.streams),
    "tee": ("tee", scalar_values.streams),
    "log_line_prefix_template": ("log_line_prefix_template", scalar_values.text),
    "local_ranks_filter": ("local_ranks_filter", scalar_values.local_ranks),
    "duplicate_stdout_filters": ("duplicate_stdout_filters", scalar_values.text),
    "duplicate_stderr_filters": ("duplicate_stderr_filters", scalar_values.text),
    "label_output": ("labels_output", scalar_values.switch),
    "local_addr": ("local_addr", scalar_values.text),
    "master_addr": ("master_addr", scalar_values.text),
    "master_port": ("master_port", scalar_values.port_or_any),
    "node_rank": ("node_rank", scalar_values.count),
    "dashboard": ("dashboard", scalar_values.listening),
    "metrics_port": ("metrics_port", scalar_values.port_or_any),
    "otel": ("otel", scalar_values.text),
    "ledger": ("ledger_dir", scalar_values.text),
    "digest_every": ("digest_every_steps", scalar_values.count),
    "checkpoint_dir": ("checkpoint_dir", scalar_values.checkpoint_dir),
    "checkpoint_every": ("checkpoint_every", scalar_values.checkpoint_every),
    "failpoints": ("failpoints", scalar_values.text),
}


def _check_local_ranks(values: Values, config: JobConfig) -> None:
    """Checks that log options name no worker that this node will never have. Raises RequestError."""
    for key in ("redirects", "tee", "local_ranks_filter"):
        if key not in values:
            continue
        text = values[key].text
        named = [part.split(":")[0] for part in text.split(",")]
        if key != "local_ranks_filter" and ":" not in text:
            named = []
        for local_rank in map(int, named):
            if local_rank >= config.slots:
                what = f"no local rank {local_rank} with {config.slots} worker(s) on this node"
                raise refuse(values[key], what, f"ranks from 0 to {config.slots - 1}")


def _notes(values: Values, place: Rendezvous, waits: Waits) -> tuple[str, ...]:
    for key, known in (("logs_specs", _LOGS_SPECS), ("event_log_handler", _EVENT_LOG_HANDLERS)):
        if key in values:
            scalar_values.choice(*known)(values[key])
    without = [values[key].where for key in _WITHOUT_EFFECT if key in values]
    ignored = list(waits.without_effect)
    if waits.is_host is not None and not place.obeys_is_host:
        ignored.append(IS_HOST)
    without += [f"{values['rdzv_conf'].where} {key}" for key in ignored]
    if not without:
        return place.notes
    return (*place.notes, f"accepted for compatibility, ignored: {', '.join(without)}")
