"""The texts of the daemon's systemd unit and of the slice of jobs; deploy/systemd/ holds them for /opt/bagua."""

from __future__ import annotations

import re
from collections.abc import Iterable

from bagua_agent.service.units.systemd_units import SLICE

UNIT_NAME = "bagua-agent.service"
UNIT_PATH = f"/etc/systemd/system/{UNIT_NAME}"
SLICE_PATH = f"/etc/systemd/system/{SLICE}"
SLICE_TEXT = """\
# All jobs of a node together. Each has a limit of 80 % of the host's tasks in its own unit; this one leaves the daemon
# and etcd their threads when several jobs fork without end.
[Unit]
Description=Bagua jobs
# At a shutdown these end after the jobs, which leave in order: they write a last checkpoint and tell etcd.
After=network-online.target remote-fs.target bagua-etcd.service

[Slice]
TasksMax=90%
"""
# StateDirectory=, LogsDirectory=
_MADE_BY_SYSTEMD = ("/var/lib/bagua", "/var/log/bagua")

_PLAIN = re.compile(r"[A-Za-z0-9._/+-]+")
_BLANKS = re.compile("PROGRAM|CONFIG|WRITABLE")  # in _TEXT

_TEXT = """\
# The daemon of a node. It carries no job: each runs in a unit of its own (bagua-job-<job>.service, in bagua.slice),
# which goes on while this one is stopped, upgraded or killed.
[Unit]
Description=Bagua node agent
After=network-online.target
Wants=network-online.target
# Started again however often it fails: what keeps it from starting may pass by itself, such as a driver that is loaded
# late, or a clock that is not set yet.
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart=PROGRAM serve --config CONFIG
Restart=always
RestartSec=5
# It is ready once etcd has answered, however long that takes.
TimeoutStartSec=infinity
TimeoutStopSec=30
WatchdogSec=30
StateDirectory=bagua
StateDirectoryMode=0700
LogsDirectory=bagua
LogsDirectoryMode=0751
RuntimeDirectory=bagua
SyslogIdentifier=bagua-agent
UMask=0022
# Many times what it uses. Beyond that it is ended and started again, for a node is not to be lost to one service; jobs
# are in control groups of their own.
MemoryMax=2G
TasksMax=2048
# While the host is short of memory the kernel ends a process of a job before this one.
OOMScoreAdjust=-900
WRITABLE
# Root, for it asks systemd for units and changes to the accounts of jobs; nothing beyond that. Jobs' own units are not
# restricted by any of this: they need GPUs, pinned memory and the network.
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectHostname=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
LockPersonality=yes
SystemCallArchitectures=native
# The clock is protected by these two. ProtectClock=yes also allows /dev/rtc, and before systemd 253 a list of allowed
# devices denied all others: nvidia-smi, which the daemon runs, found no GPU.
CapabilityBoundingSet=~CAP_SYS_TIME CAP_WAKE_ALARM
SystemCallFilter=~@clock:EPERM
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

[Install]
WantedBy=multi-user.target
"""


def unit_text(program: str, config_path: str, directories: Iterable[str] = ()) -> str:
    """Returns the text of the daemon's systemd unit. program: the `bagua-agent` of this installation, an absolute path
    without blanks. config_path: absolute. directories: that the configuration names; those that systemd does not make
    for the unit must be there."""
    own = sorted(d for d in set(directories) if not made_by_systemd(d))
    writable = "".join(f"ReadWritePaths={_quoted(directory)}\n" for directory in own)
    values = {"PROGRAM": program, "CONFIG": _word(config_path), "WRITABLE": writable}
    # in one pass, for a path may hold these words
    return _BLANKS.sub(lambda found: values[found.group()], _TEXT)


def made_by_systemd(directory: str) -> bool:
    return any(directory == made or directory.startswith(f"{made}/") for made in _MADE_BY_SYSTEMD)


def _word(path: str) -> str:
    """Returns a path in the form that systemd reads as one word of a command line."""
    return path if _PLAIN.fullmatch(path) else _quoted(path).replace("$", "$$")


def _quoted(path: str) -> str:
    """Returns a path in the form that systemd reads as one path, whatever is in it."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
