"""Checks that the node has what jobs need; each finding says what it means and what to do.

A trouble keeps jobs away (the daemon reports it to the scheduler, which replaces the node first); a note does not. The
decisions are pure, separate from the measurements. A program that does not answer is killed, and that is a trouble; one
that SIGKILL does not end, in state D, and a file system that hangs keep the look from ending, which its caller notices.
"""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path

from bagua_agent.base.driver_gpus import gpus_of_the_driver
from bagua_agent.base.errors import BaguaError, UserError
from bagua_agent.config.etcd_credentials import store_config
from bagua_agent.etcd.client import Store
from bagua_agent.etcd.failover import FULL
from bagua_agent.etcd.known_defects import warning
from bagua_agent.security.certificate_files import read_certificates, utc_now
from bagua_agent.service.config.agent_config import AgentConfig
from bagua_agent.service.units.systemd_units import is_there
from bagua_agent.workers.process.account import find_account
from bagua_contract.addresses import family_of
from bagua_contract.distribution import CUPY_HINT, original_beside

ETCD_TIMEOUT_S = 5.0
PROGRAM_TIMEOUT_S = 30.0
# A disk is nearly full below 5 % of it; but 4 GiB are enough on any, and less than 256 MiB on none: a job's logs and an
# etcd's final writes fit into that. Below, writing fails at the worst moment.
LEAST_FREE_SHARE = 0.05
ENOUGH_FREE_BYTES = 4 << 30
LEAST_FREE_BYTES = 256 << 20
LEAST_FREE_FILES = 1000
EXPIRY_TOLD = timedelta(days=30)  # before it; the certificates of a cluster are commonly of one day


class Weight(Enum):
    FINE = "ok"
    NOTE = "note"
    TROUBLE = "TROUBLE"


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    weight: Weight
    text: str

    def __str__(self) -> str:
        return f"{self.weight.value:8}{self.what}: {self.text}"


def troubles(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Returns the troubles of the findings as they are reported to the scheduler."""
    return tuple(f"{f.what}: {f.text}" for f in findings if f.weight is Weight.TROUBLE)


def notes(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Returns the notes of the findings as they are reported to people; a note keeps no job away."""
    return tuple(f"{f.what}: {f.text}" for f in findings if f.weight is Weight.NOTE)


# -- judging


def judge_packages(original_beside: str | None) -> list[Finding]:
    """Finds a trouble if the original Bagua is in this environment. original_beside: what distribution.py returns about
    it."""
    return [Finding("packages", Weight.TROUBLE, original_beside)] if original_beside else []


def judge_expiry(path: str, expires: datetime, now: datetime) -> Finding:
    """Judges how soon a certificate expires. Connections outlive it, so nothing else shows it before the node loses
    etcd, mostly together with all others."""
    if expires - now > EXPIRY_TOLD:
        return Finding("certificate", Weight.FINE, f"{path} is valid until {expires:%Y-%m-%d}")
    verb = "expires" if expires > now else "expired"
    text = (
        f"{path} {verb} on {expires:%Y-%m-%d %H:%M UTC}, and no connection is made with it from then on; copy a new "
        "one there (bagua-agent certs issue --replace)"
    )
    return Finding("certificate", Weight.NOTE, text)


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The size and the free space of a disk. free_files: how many more files may be made; None: the file system has no
    such limit."""

    size_bytes: int
    free_bytes: int
    free_files: int | None = None


def judge_disk(path: str, space: DiskSpace) -> Finding:
    """Judges the free space of a disk. The text of a trouble has no figure that changes from look to look: each new
    text is written to etcd."""
    least = max(LEAST_FREE_BYTES, min(int(LEAST_FREE_SHARE * space.size_bytes), ENOUGH_FREE_BYTES))
    if space.free_bytes < least:
        text = f"nearly full: less than {least / 1e9:.1f} GB are free in {path}; make room"
        return Finding("disk", Weight.TROUBLE, text)
    if space.free_files is not None and space.free_files < LEAST_FREE_FILES:
        text = f"nearly full: fewer than {LEAST_FREE_FILES} files can be made in {path}; remove some"
        return Finding("disk", Weight.TROUBLE, text)
    return Finding("disk", Weight.FINE, f"{space.free_bytes / 1e9:.1f} GB free in {path}")


def judge_gpus(slots: int | str, driver: int, answer: str | None) -> list[Finding]:
    """Judges the GPUs. driver: GPUs that the kernel's driver lists. answer: of nvidia-smi, a line a GPU, "index,
    uncorrected errors"; None: it does not answer."""
    if not driver:
        if slots == "gpu":
            return [Finding("GPU", Weight.TROUBLE, "none is there; load the driver, or set node.slots")]
        return [Finding("GPU", Weight.FINE, "none, and none is asked for")]
    if answer is None:
        text = f"the driver lists {driver}, but nvidia-smi does not answer; look at dmesg for Xid, reset or reboot"
        return [Finding("GPU", Weight.TROUBLE, text)]
    found = []
    seen = [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.strip()]
    if len(seen) < driver:
        text = f"the driver lists {driver}, nvidia-smi {len(seen)}; one has fallen off the bus, so reboot"
        found.append(Finding("GPU", Weight.TROUBLE, text))
    for index, errors in (line[:2] for line in seen if len(line) >= 2):
        if errors.isdecimal() and int(errors):
            text = f"GPU {index} has {errors} uncorrected memory errors; reset it, and replace it if they come again"
            found.append(Finding("GPU", Weight.TROUBLE, text))
    return found or [Finding("GPU", Weight.FINE, f"{driver}, without memory errors")]


def judge_account(name: str, exists: bool, why_not: str | None) -> Finding:
    """Judges an account that jobs may run as. why_not: what this interpreter prints when it can't start under that
    account; None: it starts."""
    if not exists:
        return Finding("account", Weight.TROUBLE, f"{name!r} does not exist; useradd --create-home {name}")
    if why_not is not None:
        text = (
            f"{name!r} can't run {sys.executable}: {why_not}; install bagua where all may read it, as in /opt"
        )
        return Finding("account", Weight.TROUBLE, text)
    return Finding("account", Weight.FINE, f"{name!r} can run workers")


def judge_slow_import(name: str, limit_s: float) -> Finding:
    """Returns the note of a slow import. A busy node or a slow disk keeps no worker from running."""
    text = (
        f"as {name!r}, bagua_core was not imported within {limit_s:g} s; the node is busy or its disk is slow, "
        "so workers start late"
    )
    return Finding("account", Weight.NOTE, text)


# -- looking


def look_for_trouble(config: AgentConfig) -> list[Finding]:
    """Checks what may change while a daemon runs, and is quick to see. The daemon calls it in every look."""
    found = [judge_disk(path, disk_space(path)) for path in _directories(config)]
    found += judge_gpus(config.node_slots, gpus_of_the_driver(), _nvidia_smi())
    return found


def check_certificates(config: AgentConfig, now: datetime) -> list[Finding]:
    """Checks when the certificates that this node shows, and the authorities, expire. now: in UTC."""
    # while one authority replaces another, their file holds both; a certificate's file may hold its authority's too
    of_file = dict.fromkeys((config.etcd_ca_file, config.tls_ca_file), max)
    of_file |= dict.fromkeys((config.etcd_cert_file, config.tls_cert_file), min)
    return [_certificate(path, now, end) for path, end in of_file.items() if path]


def check_revocation(config: AgentConfig) -> list[Finding]:
    """Checks whether this daemon refuses certificates that were retired. Returns no finding without TLS."""
    if config.tls_files is None:
        return []
    if config.tls_revoked_file:
        text = f"certificates in {config.tls_revoked_file} are refused"
        return [Finding("revocation", Weight.FINE, text)]
    text = (
        "tls.revoked_file is not set, so this daemon accepts a retired certificate until it expires; copy the "
        "authority's revoked.pem to this node, set the key and restart the daemon"
    )
    return [Finding("revocation", Weight.NOTE, text)]


def check_accounts(config: AgentConfig) -> list[Finding]:
    """Checks whether the accounts that jobs may run as can run workers."""
    return [_account(name) for name in dict.fromkeys((config.jobs_default_user, *config.jobs_users))]


def check_node(config: AgentConfig, *, daemon_runs: bool) -> list[Finding]:
    """Makes all checks, for a person. daemon_runs: the daemon runs, so it rightly has its port."""
    found = [_etcd(config), _clock(), _systemd()]
    if not daemon_runs:
        found.append(_port(config))
    return [
        *found,
        *check_certificates(config, utc_now()),
        *check_revocation(config),
        *judge_packages(original_beside()),
        *check_accounts(config),
        *look_for_trouble(config),
        *_nccl(),
    ]


def _directories(config: AgentConfig) -> list[str]:
    return [config.directories_state, config.directories_log]


def disk_space(path: str) -> DiskSpace:
    """Returns the space of the disk that holds the path, or will hold it once it is made; free is what accounts other
    than root can use."""
    place = Path(path)
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    return DiskSpace(
        found.f_blocks * found.f_frsize,
        found.f_bavail * found.f_frsize,
        found.f_favail if found.f_files else None,  # 0: files are made as they are needed, as on btrfs
    )


def _etcd(config: AgentConfig) -> Finding:
    try:
        store = Store(store_config(config.etcd_endpoints, config.store_credentials))
    except UserError as error:
        return Finding("etcd", Weight.TROUBLE, str(error))
    try:
        store.connect(ETCD_TIMEOUT_S)
        endpoint = store.endpoint
        try:
            status = store.status(ETCD_TIMEOUT_S)
            defect = warning(status.version, len(store.member_names(ETCD_TIMEOUT_S)))
        except UserError as error:  # as etcd 3.6 with users, which tells root alone
            text = f"{endpoint} answers, and its release and state are not known: {error}"
            return Finding("etcd", Weight.NOTE, text)
    except BaguaError as error:
        return Finding("etcd", Weight.TROUBLE, str(error))
    finally:
        store.close()
    if not status.has_leader:
        return Finding("etcd", Weight.TROUBLE, f"{status.endpoint} has no leader; look at the other members")
    if status.is_full:
        text = f"{status.endpoint} {FULL}"
        return Finding("etcd", Weight.TROUBLE, text)
    if defect:
        return Finding("etcd", Weight.NOTE, defect)
    return Finding(
        "etcd", Weight.FINE, f"{status.version} at {status.endpoint}, {status.db_size_bytes / 1e6:.1f} MB"
    )


def _certificate(path: str, now: datetime, end: Callable[[Iterable[datetime]], datetime]) -> Finding:
    """Judges the expiry of the certificates of a file. end: chooses the end that counts, of all those in the file."""
    try:
        found = read_certificates(Path(path), "certificate")
    except UserError as error:
        return Finding("certificate", Weight.NOTE, str(error))
    return judge_expiry(path, end(certificate.not_valid_after_utc for certificate in found), now)


def _clock() -> Finding:
    said = _output(["timedatectl", "show", "--property=NTPSynchronized", "--value"])
    if said is None or said.strip() not in ("yes", "no"):
        return Finding(
            "clock", Weight.NOTE, "it is unknown whether it is synchronized; only certificates mind"
        )
    if said.strip() == "no":
        return Finding(
            "clock",
            Weight.NOTE,
            "not synchronized; certificates may seem expired, so run chrony or timesyncd",
        )
    return Finding("clock", Weight.FINE, "synchronized")


def _systemd() -> Finding:
    if is_there():
        return Finding("systemd", Weight.FINE, "each job gets a control group of its own")
    return Finding("systemd", Weight.NOTE, "not booted by it; jobs run as plain processes")


def _port(config: AgentConfig) -> Finding:
    with socket.socket(family_of(config.listen_address)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.listen_address, config.listen_port))
        except OSError as error:
            text = f"{config.listen_port} can't be listened at ({error.strerror}); set listen.port or listen.address"
            return Finding("port", Weight.TROUBLE, text)
    return Finding("port", Weight.FINE, f"{config.listen_port} is free")


def _account(name: str) -> Finding:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return judge_account(name, False, None)
    try:
        account = find_account(name)
    except UserError as error:
        return Finding("account", Weight.NOTE, f"{error}; not looked at further")
    extra = {} if account is None else account.process_arguments
    try:
        done = subprocess.run(
            [sys.executable, "-c", "import bagua_core.worker.run_script"],
            capture_output=True, text=True, cwd="/", timeout=PROGRAM_TIMEOUT_S, check=False, **extra,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return judge_slow_import(name, error.timeout)
    except OSError as error:
        return judge_account(name, True, error.strerror or repr(error))
    last = done.stderr.strip().splitlines()[-1:] or [f"exit {done.returncode}"]
    return judge_account(name, True, None if done.returncode == 0 else last[0])


def _nvidia_smi() -> str | None:
    return _output(
        ["nvidia-smi", "--query-gpu=index,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader"]
    )


def _nccl() -> list[Finding]:
    if not gpus_of_the_driver():
        return []
    # isolated: by root, in whatever directory, whose files must not be imported
    said = _output([sys.executable, "-I", "-c", "from cupy.cuda import nccl; print(nccl.get_version())"])
    if said is None:
        text = f"no CuPy with NCCL, so gradients go by way of the CPU; {CUPY_HINT}"
        return [Finding("NCCL", Weight.NOTE, text)]
    return [Finding("NCCL", Weight.FINE, said.strip())]


def _output(
    line: list[str], run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> str | None:
    """Returns the output of a program; None if it can't be run, fails, or does not end."""
    try:
        done = run(
            line, capture_output=True, text=True, timeout=PROGRAM_TIMEOUT_S, check=False, env=dict(os.environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
