"""The table of options: names, help texts and documented defaults.

The command line, the environment and the configuration file all read it. Does not define what values
mean (job_request.py does), and takes the defaults that it shows from their definitions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from bagua_agent.base.sizes import ANY_SIZE
from bagua_agent.config.job_config import STATIC_MASTER_PORT, VIRTUAL_SHARDS, JobConfig
from bagua_agent.membership.policy import Policy

SIZE = "Size"
RENDEZVOUS = "Rendezvous"
PROGRAM = "Program"
LOGS = "Logs"
ADDRESSES = "Addresses"
BINDING = "Devices and processors"
RECORDS = "Records"
RESULT = "Reproducible results"
TUNING = "Tuning"
HOSTS = "Several hosts over SSH"
STORE = "etcd credentials"

OWN_PREFIX = "BAGUA_"
TORCHRUN_PREFIX = "PET_"


@dataclass(frozen=True, slots=True)
class Option:
    """An option. `metavar` is empty for a switch; `own` ones are not torchrun's. other_names: further spellings.
    bare_value: what the option says without `=VALUE`, the only way to give it one; empty: it needs one."""

    name: str
    group: str
    help: str
    metavar: str = ""
    short: str = ""
    own: bool = False
    hidden: bool = False
    more_variables: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    bare_value: str = ""

    @property
    def flag(self) -> str:
        return "--" + self.name

    @property
    def flags(self) -> tuple[str, ...]:
        """The spellings of the option."""
        return (self.flag, *("--" + name for name in self.other_names), *filter(None, [self.short]))

    @property
    def is_switch(self) -> bool:
        return not self.metavar

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables that set it, the strongest first."""
        prefix = OWN_PREFIX if self.own else TORCHRUN_PREFIX
        return (prefix + self.key.upper(), *self.more_variables)


_DEFAULTS = {field.name: field.default for field in fields(JobConfig)}


_KILLS = Policy().most_kills_in_a_row + 1


def _default(name: str) -> str:
    """Returns the text of --help for the default of a JobConfig field, such as "Default 30."."""
    value = _DEFAULTS[name]
    if isinstance(value, tuple):
        value = ",".join(value)
    return f"Default {value:g}." if isinstance(value, float) else f"Default {value}."


NNODES = Option(
    "nnodes", SIZE, f"Nodes: a number, or the least and the most. {_default('min_nodes')}", "N|MIN:MAX"
)

ENDPOINTS_FORM = "as HOST:PORT or https://HOST:PORT[,...]; BAGUA_ETCD too."

ENDPOINT = Option(
    "rdzv-endpoint",
    RENDEZVOUS,
    f"etcd, {ENDPOINTS_FORM} Without it this node starts one.",
    "ENDPOINTS",
    more_variables=("BAGUA_ETCD",),
    other_names=("etcd",),
)
JOB_ID = Option("rdzv-id", RENDEZVOUS, "The job's id, the same on every node.", "ID")

CREDENTIALS = (
    Option("etcd-ca", STORE, "Certificate authority that signed etcd's certificate.", "FILE", own=True),
    Option("etcd-cert", STORE, "This client's certificate.", "FILE", own=True),
    Option("etcd-key", STORE, "This client's private key.", "FILE", own=True),
    Option("etcd-user", STORE, "etcd user.", "NAME", own=True),
    Option("etcd-password-file", STORE, "File with that user's password.", "FILE", own=True),
)

AUTOTUNE_OPTIONS = (
    Option(
        "autotune-level", TUNING,
        "1: measure other sizes of buckets, orders of tensors and routes while the job trains, and keep the fastest. "
        f"2: the same, and the algorithms of --autotune-algorithms. 0: off. {_default('autotune_level')}",
        "0|1|2", own=True,
    ),
    Option(
        "autotune-algorithms", TUNING,
        "With level 2: algorithms that may be tried, as bytegrad. Another algorithm is another arithmetic; without "
        "this option none is tried.",
        "NAME,...", own=True,
    ),
    Option(
        "autotune-max-samples", TUNING, f"Most trials of a study. {_default('autotune_max_samples')}", "N", own=True,
    ),
    Option(
        "autotune-sampling-confidence-time", TUNING,
        f"Seconds of training that one trial is measured. {_default('autotune_confidence_s')}", "SECONDS", own=True,
    ),
    Option(
        "autotune-warmup-time", TUNING,
        f"Seconds of training before the first trial. {_default('autotune_warmup_s')}", "SECONDS", own=True,
    ),
    Option("is-output-autotune-log", TUNING, "Print each trial on the leader's terminal.", own=True),
)  # fmt: skip

RUN_OPTIONS = (
    NNODES,
    Option(
        "sizes",
        SIZE,
        "Numbers of nodes that the job may have, as 2,4,8, both ends of --nnodes among them. Other ready nodes are "
        "spares. Default: each from MIN to MAX.",
        "N,...",
        own=True,
    ),
    Option(
        "start-size",
        SIZE,
        "Nodes that the job waits for before it starts. Default: the least.",
        "N",
        own=True,
    ),
    Option(
        "cooldown",
        SIZE,
        "Seconds between a change of the number of nodes and the next voluntary one (a join, scale). Losses and "
        f"leaves never wait. Default {ANY_SIZE.cooldown_s:g}.",
        "SECONDS",
        own=True,
    ),
    Option(
        "nproc-per-node",
        SIZE,
        "Workers on this node: a number, gpu (one a GPU), cpu (one a processor), "
        f"auto (gpu if there are any, else cpu). {_default('slots')}",
        "N|auto|cpu|gpu",
    ),
    Option(
        "replica-size",
        SIZE,
        "Workers that hold one copy of a sharded model together: a number, which may be of several nodes' workers, or "
        "node (those of one node). With 1 each worker holds a copy. Default 1.",
        "K|node",
        own=True,
    ),
    ENDPOINT,
    JOB_ID,
    Option("standalone", RENDEZVOUS, "One node with a private etcd; other rendezvous options are ignored."),
    Option(
        "rdzv-backend",
        RENDEZVOUS,
        "etcd (default); c10d, etcd-v2 and static are accepted, and a note says what is done instead.",
        "NAME",
    ),
    Option(
        "rdzv-conf",
        RENDEZVOUS,
        "Waits in seconds: join_timeout, last_call_timeout, node_window, lease_ttl, probe_window, "
        "below_minimum_timeout, holder_timeout ('none': without limit), hang_notice, hang_renew. "
        "With c10d also is_host=1 or 0: whether this node hosts etcd.",
        "KEY=VALUE,...",
    ),
    Option(
        "print-completion",
        PROGRAM,
        "Print a completion script for a shell (bash, zsh, fish) and exit.",
        "SHELL",
    ),
    Option("module", PROGRAM, "Run SCRIPT as `python -m` would.", short="-m"),
    Option("no-python", PROGRAM, "Run SCRIPT itself, without python."),
    Option("run-path", PROGRAM, "Run SCRIPT with runpy.run_path in an interpreter that is already up."),
    Option(
        "max-restarts",
        PROGRAM,
        "Script failures the whole job survives: non-zero exits, and signals that a program brings on itself (SIGSEGV, "
        "SIGABRT, SIGBUS, SIGFPE, SIGILL). Lost hosts, changes of membership and other signals do not count, but "
        f"{_KILLS} kills in a row in one slot without progress (a committed step; for torchrun scripts ten minutes of "
        f"running) end the job, or more if this is larger. {_default('max_restarts')}",
        "N",
    ),
    Option(
        "once",
        PROGRAM,
        "End with 0 if the job of this id has succeeded already, as on a node that comes late, instead of running it "
        "again. One that failed or was stopped is run again.",
        own=True,
    ),
    Option(
        "shutdown-timeout",
        PROGRAM,
        f"Seconds between SIGTERM and SIGKILL. {_default('shutdown_timeout_s')}",
        "SECONDS",
        more_variables=("TORCH_ELASTIC_SHUTDOWN_TIMEOUT",),
    ),
    Option(
        "hang-timeout",
        PROGRAM,
        "Seconds after which a worker that keeps all others waiting is replaced, its stacks saved; more than "
        f"the slowest checkpoint takes, or 'never'. {_default('hang_timeout_s')}",
        "SECONDS|never",
        own=True,
    ),
    Option(
        "signals-to-handle",
        PROGRAM,
        "Signals on which the agent ends its workers in order. Under nohup SIGHUP must be named. "
        f"{_default('signals_to_handle')}",
        "NAME,...",
    ),
    Option("role", PROGRAM, f"Role name given to the workers. {_default('role')}", "NAME"),
    Option(
        "start-method",
        PROGRAM,
        "warm (default): workers are forked from a process that has torch imported; spawn: each starts an interpreter.",
        "NAME",
    ),
    Option(
        "monitor-interval",
        PROGRAM,
        "Accepted for compatibility with torchrun; ignored: exits are seen at once.",
        "SECONDS",
    ),
    Option(
        "event-log-handler",
        PROGRAM,
        "Accepted for compatibility with torchrun; ignored.",
        "NAME",
    ),
    Option("log-dir", LOGS, "Directory for log files; each run has a directory of its own there.", "DIR"),
    Option(
        "max-log-mib",
        LOGS,
        f"Keep at most this many MiB of each worker stream, the newest; 0 keeps everything. {_default('max_log_mib')}",
        "MIB",
        own=True,
    ),
    Option(
        "redirects",
        LOGS,
        "Streams that go to files: 1 stdout, 2 stderr, 3 both; or by local rank, as 0:1,1:2.",
        "SPEC",
        "-r",
    ),
    Option(
        "tee",
        LOGS,
        "Streams that go to files and the console, as --redirects; each line begins with [ROLE+LOCAL_RANK]:",
        "SPEC",
        "-t",
    ),
    Option(
        "log-line-prefix-template",
        LOGS,
        "Prefix of teed lines on the console, with ${role_name}, ${local_rank}, ${rank} and ${hostname} replaced.",
        "TEMPLATE",
        more_variables=("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",),
    ),
    Option("local-ranks-filter", LOGS, "Local ranks whose output the console shows, as 0,2.", "RANKS"),
    Option(
        "duplicate-stdout-filters",
        LOGS,
        "Copy stdout lines with one of these words to a file of their own.",
        "WORD,...",
    ),
    Option("duplicate-stderr-filters", LOGS, "The same for stderr.", "WORD,..."),
    Option(
        "label-output",
        LOGS,
        "Begin each line of a worker with its node and local rank, as [h1:0]; on with --hosts.",
        own=True,
    ),
    Option("logs-specs", LOGS, "torch's default is accepted for compatibility; ignored.", "NAME"),
    Option("local-addr", ADDRESSES, "This node's address, as its peers reach it.", "ADDRESS"),
    Option(
        "master-addr",
        ADDRESSES,
        "As with torchrun's static rendezvous: the node that hosts the store.",
        "ADDRESS",
    ),
    Option(
        "master-port",
        ADDRESSES,
        f"The workers' port there; etcd takes the next one. Default {STATIC_MASTER_PORT}.",
        "PORT",
    ),
    Option("node-rank", ADDRESSES, "Ranks nodes that start together; with --master-addr, 0 hosts etcd.", "N"),
    Option(
        "numa-binding",
        BINDING,
        "Processors of each worker: those near its GPU by node or socket, exclusive, or core-complex.",
        "MODE",
    ),
    Option("virtual-local-rank", BINDING, "LOCAL_RANK is 0 for every worker, which sees only its own GPU."),
    Option(
        "enable-bagua-net", BINDING, "NCCL sends through Bagua-Net, which each host compiles once.", own=True
    ),
    Option(
        "metrics-port",
        RECORDS,
        "Serve Prometheus's /metrics, and /healthz and /readyz, at this port of every address; 0 takes a free one.",
        "PORT",
        own=True,
    ),
    Option(
        "otel",
        RECORDS,
        "Send each node's metrics and the job's events by OpenTelemetry's protocol (OTLP) to this collector, as "
        "http://HOST:4318. Default: what OTEL_EXPORTER_OTLP_ENDPOINT says. Needs the extra otel.",
        "URL",
        own=True,
    ),
    Option(
        "dashboard",
        RECORDS,
        "Serve a page about the job, and what --metrics-port serves, at this port or HOST:PORT of this node. Alone: at "
        "127.0.0.1:7465, or a free port where that is taken.",
        "=PORT",
        own=True,
        bare_value="yes",
    ),
    Option(
        "deterministic",
        RESULT,
        "The result is bitwise the same for any number of workers and any history of joins, leaves and losses.",
        own=True,
    ),
    Option(
        "virtual-shards",
        RESULT,
        "With --deterministic: parts of each global batch, fixed for the job's life, at least as many as workers. "
        f"Default {VIRTUAL_SHARDS}.",
        "N",
        own=True,
    ),
    *AUTOTUNE_OPTIONS,
    Option("ledger", RECORDS, "Write one line per worker and committed step into DIR.", "DIR", own=True),
    Option(
        "digest-every",
        RECORDS,
        f"Compare a digest of the parameters every N steps; 0 never. {_default('digest_every_steps')}",
        "N",
        own=True,
    ),
    Option(
        "checkpoint-dir",
        RECORDS,
        "Write the job's state into DIR, which every node sees, or URL (s3://BUCKET/PREFIX), and go on from the "
        "newest one there.",
        "DIR|URL",
        own=True,
    ),
    Option(
        "checkpoint-every",
        RECORDS,
        f"How often: steps as 500, or seconds as 30s. {_default('checkpoint_every')}",
        "STEPS|SECONDSs",
        own=True,
    ),
    Option("failpoints", RECORDS, "Places in which to fail, for tests.", "SPEC", own=True, hidden=True),
    Option(
        "hosts",
        HOSTS,
        "Start the job on these from here: no daemons, and an etcd of the job's own. HOST:8 says how many workers.",
        "HOST[:N],...",
        own=True,
    ),
    Option("ssh", HOSTS, "How to reach them. Default 'ssh -o BatchMode=yes'.", "COMMAND", own=True),
    Option("remote-python", HOSTS, "Interpreter there. Default: this one's path.", "PATH", own=True),
    Option(
        "env", HOSTS, "Variables there: with a value, or this terminal's own.", "NAME[=VALUE],...", own=True
    ),
    *CREDENTIALS,
)

SCALE_OPTIONS = (
    replace(ENDPOINT, help=f"The job's etcd, {ENDPOINTS_FORM}"),
    replace(JOB_ID, help="The job's id."),
    *CREDENTIALS,
)
