"""Translates command lines of the original Bagua's three launchers into those of bagua-launch. Pure.

Owns their flags (torchrun's and bagua-launch's are options.py's) and what each becomes: the option of bagua-launch that
does it, a variable, or a note that says why it has no effect. What follows the script is the script's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bagua_launch.command_line import whole_flags
from bagua_launch.errors import RequestError
from bagua_launch.options import RUN_OPTIONS, Option

HOSTS_VARIABLE, SSH_PORT_VARIABLE = "BAGUA_NODE_DOMAIN_NAMES", "BAGUA_SSH_PORT"
BUCKET_SIZE_VARIABLE = "BAGUA_DEFAULT_BUCKET_SIZE"
DEFAULT_SSH_PORT = "22"
RUNS_MAX_RESTARTS = "3"  # of the original's `run`, as of the torchelastic that it was made of


class Original(Enum):
    """A launcher of the original Bagua.

    BAGUARUN: several hosts over SSH. LAUNCH: one node of a fixed number. RUN: torchrun's flags.
    """

    BAGUARUN = "baguarun"
    LAUNCH = "bagua_core.distributed.launch"
    RUN = "bagua_core.distributed.run"


_AUTOTUNE_LOG = "`bagua-launch events JOB` lists each trial; --is_output_autotune_log prints them too"
_METRICS = "the terminal shows the job's progress; the script adds numbers by bagua.report(loss=...)"
_SSH = "this command starts one node; baguarun, or bagua-launch --hosts, starts several over SSH"

NO_EFFECT: dict[str, str] = {
    "--bagua-service-port": "no service listens on a port of its own; leave it out",
    "--autotune-log-file": _AUTOTUNE_LOG,
    "--report-metrics": _METRICS,
    "--host-list": _SSH,
    "--ssh-port": _SSH,
    "--use-env": "workers have LOCAL_RANK in their environment anyway; leave it out",
}
"""Flags that are taken and do nothing, each with the way to go."""

_ADDITIONAL = (
    "scripts get no --local_rank argument; read os.environ['LOCAL_RANK'] or call bagua.get_local_rank()"
)

HINTS: dict[str, str] = {
    **NO_EFFECT,
    "--host-list": "use --hosts HOST[:WORKERS],...; baguarun takes it as it is",
    "--ssh-port": "use --ssh 'ssh -o BatchMode=yes -p PORT'; baguarun takes it as it is",
    "--logdir": "use --log-dir DIR --redirects 3",
    "--default-bucket-size": f"set {BUCKET_SIZE_VARIABLE}, or bucket_cap_mb of DistributedDataParallel",
    "--set-additional-flag": _ADDITIONAL,
    "--bagua-net-switch-on": "use --enable-bagua-net",
    "-x": "use --env NAME[=VALUE],...",
}
"""What bagua-launch says where it is given one of the original's flags."""


def _option(name: str, text: str, metavar: str = "", short: str = "") -> Option:
    return Option(name, "original", text, metavar, short)


def _ignored(name: str, metavar: str = "") -> Option:
    return _option(name, f"Ignored: {NO_EFFECT['--' + name]}.", metavar)


def _of_bagua_launch(name: str) -> Option:
    (row,) = (row for row in RUN_OPTIONS if row.name == name)
    return _option(name, row.help, row.metavar)


_AUTOTUNE_ROWS = tuple(
    map(
        _of_bagua_launch,
        (
            "autotune-level",
            "autotune-max-samples",
            "autotune-sampling-confidence-time",
            "autotune-warmup-time",
            "is-output-autotune-log",
        ),
    )
)
_AUTOTUNE = frozenset(row.flag for row in _AUTOTUNE_ROWS)
"""Flags that bagua-launch has too; it tunes from level 1 on."""

_LAUNCHERS = (
    _ignored("bagua-service-port", "PORT"),
    *_AUTOTUNE_ROWS,
    _ignored("autotune-log-file", "FILE"),
    _ignored("report-metrics"),
    _option("default-bucket-size", f"Set {BUCKET_SIZE_VARIABLE}, the bytes of a bucket.", "BYTES"),
    _of_bagua_launch("enable-bagua-net"),
    _option("bagua-net-switch-on", "The same as --enable_bagua_net."),
    _ignored("use-env"),
    _option("set-additional-flag", f"Refused: {_ADDITIONAL}."),
    _option("logdir", "Write workers' output to files: --log-dir DIR --redirects 3.", "DIR"),
    _ignored("host-list", "HOSTS"),
    _ignored("ssh-port", "PORT"),
)
_BAGUARUN = (
    _option(
        "host-list",
        f"Start a node on each of HOST[:SSH PORT],...: --hosts. Default: {HOSTS_VARIABLE}.",
        "HOSTS",
    ),
    _option(
        "ssh-port", f"The hosts' port of SSH. Default: {SSH_PORT_VARIABLE}, else {DEFAULT_SSH_PORT}.", "PORT"
    ),
    _ignored("bagua-service-port", "PORT"),
    _of_bagua_launch("enable-bagua-net"),
    _option("master-port", "Ignored: the nodes choose a free port.", "PORT"),
    _option("env-of-all-hosts", "Pass a variable to all hosts: --env.", "NAME[=VALUE]", "-x"),
    *_AUTOTUNE_ROWS,
)
(_MAX_RESTARTS,) = (row for row in RUN_OPTIONS if row.name == "max-restarts")


def described(kind: Original) -> list[tuple[str, str]]:
    """Returns each of the launcher's own flags as the original spelled it, with its value, and what it does here."""
    rows = _BAGUARUN if kind is Original.BAGUARUN else _LAUNCHERS
    spelled = {row: row.short or "--" + row.name.replace("-", "_") for row in rows}
    return [(f"{spelled[row]} {row.metavar}".strip(), row.help) for row in rows]


@dataclass(frozen=True, slots=True)
class Translation:
    """A command line of bagua-launch.

    arguments: what follows `bagua-launch run`. environment: to be added to this process's. notes: for people.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class _Read:
    """Holds the words before the script, by flag as --with-dashes, and the script with its arguments."""

    flags: list[tuple[str, str | None]]
    program: list[str]

    def value(self, flag: str) -> str | None:
        return next((value for name, value in reversed(self.flags) if name == flag), None)

    def has(self, flag: str) -> bool:
        return any(name == flag for name, _ in self.flags)


def translate(
    kind: Original, words: Sequence[str], environ: Mapping[str, str], in_file: Collection[str] = ()
) -> Translation:
    """Translates a command line of the original into one of bagua-launch. Raises RequestError.

    in_file: keys of the options that the configuration file sets.
    """
    rows = (*RUN_OPTIONS, *(_BAGUARUN if kind is Original.BAGUARUN else _LAUNCHERS))
    read = _read(kind, words, rows)
    own = {row.flag for row in (_BAGUARUN if kind is Original.BAGUARUN else _LAUNCHERS)}
    arguments = [word for flag, value in read.flags if flag not in own for word in _words(flag, value)]
    environment: dict[str, str] = {}
    notes = [
        f"{flag.replace('-', '_').replace('__', '--', 1)}: {NO_EFFECT[flag]}"
        for flag in dict.fromkeys(name for name, _ in read.flags)
        if flag in NO_EFFECT and not (kind is Original.BAGUARUN and flag in ("--host-list", "--ssh-port"))
    ]
    if read.has("--set-additional-flag"):
        raise RequestError(f"--set_additional_flag: {_ADDITIONAL}")
    if (directory := read.value("--logdir")) is not None:
        arguments += ["--log-dir", directory, "--redirects", "3"]
    if (size := read.value("--default-bucket-size")) is not None:
        environment[BUCKET_SIZE_VARIABLE] = size
    if read.value("--autotune-level") not in (None, "0"):
        arguments += [word for flag, value in read.flags if flag in _AUTOTUNE for word in _words(flag, value)]
    if read.has("--enable-bagua-net") or read.has("--bagua-net-switch-on"):
        arguments.append("--enable-bagua-net")
    has_max_restarts = (
        read.has(_MAX_RESTARTS.flag)
        or any(environ.get(name) for name in _MAX_RESTARTS.variables)
        or _MAX_RESTARTS.key in in_file
    )
    if kind is Original.RUN and not has_max_restarts:
        arguments += ["--max-restarts", RUNS_MAX_RESTARTS]
    if kind is Original.BAGUARUN:
        arguments += _on_hosts(read, environ, environment)
    return Translation((*arguments, *read.program), environment, tuple(dict.fromkeys(notes)))


def _read(kind: Original, words: Sequence[str], rows: Sequence[Option]) -> _Read:
    known = {flag: row for row in rows for flag in row.flags}
    found = whole_flags(words, rows)
    flags: list[tuple[str, str | None]] = []
    at = 0
    while at < len(found) and found[at].startswith("-") and found[at] not in ("-", "--"):
        name, equals, value = found[at].partition("=")
        flag = name.replace("_", "-")
        row = known.get(flag)
        at += 1
        if row is None:  # bagua-launch refuses it in words
            flags.append((flag, value if equals else None))
        elif row.is_switch:
            flags.append((row.flag, value if equals else None))
        elif equals:
            flags.append((row.flag, value))
        elif at < len(found):
            flags.append((row.flag, found[at]))
            at += 1
        else:
            raise RequestError(f"{kind.value}: {name} needs a value; use {name} {row.metavar}")
    return _Read(flags, found[at:])


def _words(flag: str, value: str | None) -> list[str]:
    return [flag] if value is None else [f"{flag}={value}"] if flag.startswith("--") else [flag, value]


def _on_hosts(read: _Read, environ: Mapping[str, str], environment: dict[str, str]) -> list[str]:
    """Returns --hosts, --ssh and --env of bagua-launch, and adds to `environment`. Raises RequestError."""
    listed = read.value("--host-list") or environ.get(HOSTS_VARIABLE, "")
    if not listed:
        raise RequestError(f"baguarun: no hosts are given; use --host_list HOST,HOST or set {HOSTS_VARIABLE}")
    if not read.has("--nproc-per-node"):
        raise RequestError("baguarun: --nproc_per_node is missing; use --nproc_per_node N")
    common = read.value("--ssh-port") or environ.get(SSH_PORT_VARIABLE) or DEFAULT_SSH_PORT
    hosts, ports = [], set()
    for part in listed.split(","):
        host, colon, port = part.partition(":")
        hosts.append(host)
        ports.add(port if colon else common)
    if len(ports) > 1:
        raise RequestError(
            f"--host_list {listed}: SSH ports differ ({', '.join(sorted(ports))}); give each host its Port in "
            "~/.ssh/config, and no port here"
        )
    (port,) = ports
    if not port.isdecimal():
        raise RequestError(f"--ssh_port {port!r} is no port; use a number such as {DEFAULT_SSH_PORT}")
    words = ["--hosts", ",".join(hosts)]
    if port != DEFAULT_SSH_PORT:
        words += ["--ssh", f"ssh -o BatchMode=yes -p {port}"]
    names = [name for name in ("PATH", "LD_LIBRARY_PATH") if name in environ]
    for flag, value in read.flags:
        if flag == "--env-of-all-hosts" and value is not None:
            name, equals, text = value.partition("=")
            names.append(name)
            if equals:
                environment[name] = text
    if names:
        words += ["--env", ",".join(dict.fromkeys(names))]
    return words
