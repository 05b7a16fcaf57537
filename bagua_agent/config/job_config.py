"""The configuration of one agent's job, and the only place of its defaults.

A JobConfig is checked when it is made, so its users need not check it again. Does not know flags, variables and files
(bagua_launch reads those), and imports neither torch nor grpc, so that reading a command line stays fast.
"""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum

from bagua_agent.base.sizes import ANY_SIZE, SizePolicy
from bagua_agent.membership.policy import Policy
from bagua_contract import checkpoint_dir

_POLICY = Policy()  # membership's own defaults live there


class CommandKind(Enum):
    """The way in which `WorkerCommand.target` is started."""

    SCRIPT = "script"  # python -u TARGET ARGS
    MODULE = "module"  # python -u -m TARGET ARGS
    EXECUTABLE = "executable"  # TARGET ARGS
    RUN_PATH = "run-path"  # runpy.run_path(TARGET) as __main__, in an interpreter that is already up


_SWITCHES = {
    CommandKind.SCRIPT: "",
    CommandKind.MODULE: "-m ",
    CommandKind.EXECUTABLE: "--no-python ",
    CommandKind.RUN_PATH: "--run-path ",
}
_LOCAL_RANK = "${local_rank}"


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The user's program. `args` reach it exactly as typed."""

    kind: CommandKind
    target: str
    args: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return self.target, *self.args

    def for_worker(self, local_rank: int) -> WorkerCommand:
        """Returns the command as one worker gets it: torchrun's macro ${local_rank} in an argument is replaced by its
        local rank."""
        if not any(_LOCAL_RANK in argument for argument in self.args):
            return self
        return replace(self, args=tuple(a.replace(_LOCAL_RANK, str(local_rank)) for a in self.args))

    def __str__(self) -> str:
        """Returns the command as it is typed on a command line, with the option that says how it is started."""
        return _SWITCHES[self.kind] + shlex.join((self.target, *self.args))


@dataclass(frozen=True, slots=True)
class StoreCredentials:
    """The credentials for etcd. All None: a plain connection."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    user: str | None = None
    password_file: str | None = None


# torchrun's, where nothing else is said
STATIC_MASTER_PORT = 29500
DEFAULT_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
SHUTDOWN_TIMEOUT_S = 30.0
# No clock and no record of ours holds more.
LONGEST_WAIT_S = 1e9
MAX_LOG_MIB = 256
VIRTUAL_SHARDS = 8  # of a deterministic job, unless told otherwise: whole subtrees for 1, 2, 4 and 8 workers
MOST_VIRTUAL_SHARDS = 4096
DIGEST_EVERY_STEPS = 100
LARGEST_COUNT = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class JobConfig:
    """One node's part in a job.

    Who: `slots` workers here, between `min_nodes` and `max_nodes` nodes in all.
    Replicas: `replica_size` workers hold one copy of the model together; 0: as many as this node has.
    Where: `endpoints` are entries that etcd/endpoints.py reads; None means that the agent starts an
    etcd of its own, which also serves the others if the job admits more nodes. With `hosts_store` it
    starts one at endpoints[0] instead, unless an etcd answers there already.
    Logs: `redirects` and `tee` are "0".."3" or "LOCAL_RANK:VALUE,..." (1 stdout, 2 stderr, 3 both);
    `local_ranks_filter` is "" or "0,2"; the duplicate filters are comma-separated words, ",," a comma.
    Waits: None means without limit.
    """

    job_id: str
    command: WorkerCommand
    min_nodes: int = 1
    max_nodes: int = 1
    size_policy: SizePolicy = ANY_SIZE
    slots: int = 1
    replica_size: int = 1

    endpoints: tuple[str, ...] | None = None
    hosts_store: bool = False
    store_credentials: StoreCredentials = field(default_factory=StoreCredentials)

    max_restarts: int = _POLICY.max_restarts
    role: str = "default"
    # fork from a process that has torch imported; "spawn": start an interpreter each
    start_method: str = "warm"
    signals_to_handle: tuple[str, ...] = DEFAULT_SIGNALS
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
    numa_binding: str | None = None
    virtual_local_rank: bool = False
    run_as: str | None = None  # account of the workers; None: the agent's own

    log_dir: str | None = None
    max_log_mib: int = MAX_LOG_MIB  # of one stream of one worker, the newest; 0: without a bound
    redirects: str = "0"
    tee: str = "0"
    log_line_prefix_template: str = ""  # of teed lines on the terminal; empty: [ROLE+LOCAL_RANK]:
    local_ranks_filter: str = ""
    duplicate_stdout_filters: str = ""
    duplicate_stderr_filters: str = ""
    labels_output: bool = False  # lines of workers on the terminal begin with node and local rank

    once: bool = False  # a job of this id that has succeeded is not run again

    submission: str = ""  # nonce of the submission to a cluster that this is a part of; empty: none

    node_name: str | None = None  # None: the host's
    local_addr: str | None = None
    master_addr: str | None = None
    # 0: a free one in restart mode; in live mode STATIC_MASTER_PORT, as workers start before there is a generation
    master_port: int | None = None
    node_rank: int | None = None

    metrics_port: int | None = None  # None: no endpoint; 0: a free port
    metrics_host: str = ""  # address at which it listens; empty: all of the node
    metrics_tls: tuple[str, ...] = ()  # files as TlsFiles (certificate_files.py) names them; none: plain HTTP
    otel: str | None = None  # a collector's URL; None: the standard's variables decide
    dashboard: str | None = None  # None: none; else as dashboard.listening.Listening reads it

    virtual_shards: int = 0  # of each global batch in a deterministic job; 0: the job is not deterministic

    autotune_level: int = 0  # 0: off
    autotune_max_samples: int = 60
    autotune_confidence_s: float = 5.0  # that one trial is measured
    autotune_warmup_s: float = 30.0
    autotune_algorithms: tuple[str, ...] = ()  # that may be tried; others never are
    autotune_verbose: bool = False

    ledger_dir: str | None = None
    digest_every_steps: int = DIGEST_EVERY_STEPS
    checkpoint_dir: str | None = None
    checkpoint_every: str = "60s"
    failpoints: str = ""

    join_timeout_s: float | None = 600.0
    ends_when_all_leave: bool = _POLICY.ends_when_all_leave
    # How long the first generation waits for more than the minimum, counted anew from each arrival.
    last_call_s: float = _POLICY.last_call_s
    # How long a node's ready workers wait for its slower ones: late ones join a moment later anyway.
    node_window_s: float = _POLICY.node_window_s
    lease_ttl_s: float = _POLICY.lease_ttl_s
    probe_window_s: float = _POLICY.probe_window_s
    below_minimum_timeout_s: float | None = _POLICY.below_minimum_timeout_s
    holder_timeout_s: float | None = _POLICY.holder_timeout_s
    # A worker that keeps the others waiting is named after hang_notice_s and replaced after hang_timeout_s.
    hang_notice_s: float = _POLICY.hang_notice_s
    hang_renew_s: float = _POLICY.hang_renew_s
    hang_timeout_s: float | None = _POLICY.hang_timeout_s

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"nodes {self.min_nodes}:{self.max_nodes} are not 1 <= least <= most")
        if (forbidden := self.size_policy.forbidden(self.min_nodes, self.max_nodes)) is not None:
            raise ValueError(f"{forbidden} nodes are not an allowed size ({self.size_policy.text})")
        if self.virtual_shards > MOST_VIRTUAL_SHARDS:
            raise ValueError(
                f"virtual_shards must be at most {MOST_VIRTUAL_SHARDS}, not {self.virtual_shards}"
            )
        if self.virtual_shards and self.command.kind is CommandKind.EXECUTABLE:
            raise ValueError(
                "a deterministic job runs a Python script or module: another program's random state and "
                "kernels are unknown"
            )
        if self.autotune_level and self.virtual_shards:
            raise ValueError("a deterministic job has one order of sums, so there is nothing to tune")
        if self.autotune_level and not (self.autotune_confidence_s > 0 and self.autotune_max_samples > 0):
            raise ValueError("a trial needs time, and a study at least one of them")
        if self.slots < 1:
            raise ValueError(f"slots must be at least 1, not {self.slots}")
        if self.endpoints is not None and not self.endpoints:
            raise ValueError("endpoints is empty; None means an etcd of the agent's own")
        if self.hosts_store and self.endpoints is None:
            raise ValueError("hosts_store needs an endpoint to host at")
        if self.checkpoint_dir:
            checkpoint_dir.complete(self.checkpoint_dir)
        for each in fields(self):
            value = getattr(self, each.name)
            most = LONGEST_WAIT_S if isinstance(value, float) else LARGEST_COUNT
            if isinstance(value, (int, float)) and not 0 <= value <= most:  # not a number fails too
                raise ValueError(f"{each.name} must be from 0 to {most:g}, not {reprlib.repr(value)}")


def workers_of_a_replica(config: JobConfig) -> int:
    """Returns the number of workers of a replica, at least 1."""
    return config.replica_size or config.slots


def launcher_variables(config: JobConfig, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Returns the variables that make the agent itself write a file or open a port; none where workers run as another
    account.

    There `environ` is the job's: with it a job would have the agent, which may be root, write and remove files.
    """
    return environ if config.run_as is None else {}
