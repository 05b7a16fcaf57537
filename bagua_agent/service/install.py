"""Installs and removes a node's daemon. Steps are decided first, then done.

Idempotent: a step that finds its result does nothing, and prints nothing. An existing configuration is never
overwritten.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost, UserError
from bagua_agent.security.certificate_files import REVOKED_FILE, utc_now
from bagua_agent.service.config.agent_config import AgentConfig, read_agent_config
from bagua_agent.service.config.agent_config_keys import KEYS, Value, toml
from bagua_agent.service.service_unit import (
    SLICE_PATH,
    SLICE_TEXT,
    UNIT_NAME,
    UNIT_PATH,
    made_by_systemd,
    unit_text,
)
from bagua_agent.service.units.systemd_units import PREFIX, SLICE, SystemdUnits, is_there

COMMAND_TIMEOUT_S = 60.0


_PROGRAM = re.compile(r"/[A-Za-z0-9._/+-]+")


@dataclass(frozen=True, slots=True)
class Done:
    """The result of an installation or a removal. changes: what was done, a line each; empty if all was there."""

    changes: tuple[str, ...]


def config_text(wanted: Mapping[str, Value]) -> str:
    """Returns a configuration file that sets these keys (paths as in KEYS) and nothing else. Pure."""
    lines = ["# Written by bagua-agent install; bagua-agent example-config shows every key."]
    section = ""
    for key in KEYS:
        if key.path not in wanted:
            continue
        if key.section != section:
            section = key.section
            lines += ["", f"[{section}]"]
        lines.append(f"{key.name} = {toml(wanted[key.path])}")
    return "\n".join(lines) + "\n"


def with_revocation_list(wanted: Mapping[str, Value]) -> Mapping[str, Value]:
    """Returns `wanted`, with the list of revoked certificates beside the daemon's CA file if none is named and it
    exists."""
    ca_file = wanted.get("tls.ca_file")
    if not ca_file or "tls.revoked_file" in wanted:
        return wanted
    beside = Path(str(ca_file)).with_name(REVOKED_FILE)
    return {**wanted, "tls.revoked_file": str(beside)} if beside.exists() else wanted


def install(config_path: str, wanted: Mapping[str, Value], say: Callable[[str], None]) -> Done:
    """Installs the daemon on this node. Raises UserError before anything is changed if it can't be installed, and
    InfrastructureLost if systemd does not do it."""
    program = _program()
    _need_root_and_systemd()
    config_path = os.path.abspath(config_path)  # the service runs in /
    changes = []
    path = Path(config_path)
    fresh = not path.exists()
    complete = with_revocation_list(wanted)
    # without the list too: it may have been copied there after the first install
    if not fresh and wanted and path.read_text() not in (config_text(wanted), config_text(complete)):
        raise UserError(
            f"{config_path} is there and says something else; edit it, or remove it and install again"
        )
    if fresh:
        if "etcd.endpoints" not in wanted:
            raise UserError(
                f"{config_path} does not exist; give --etcd, or write it (bagua-agent example-config)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, config_text(complete))
    try:
        config = read_agent_config(config_path, utc_now())
    except UserError:
        if fresh:
            path.unlink()
        raise
    if fresh:
        changes.append(f"wrote {config_path}")
    changes += _make_account(config)
    changes += _make_directories(config)
    unit = unit_text(program, config_path, (config.directories_state, config.directories_log))
    texts = {Path(UNIT_PATH): unit, Path(SLICE_PATH): SLICE_TEXT}
    stale = {path: text for path, text in texts.items() if not path.exists() or path.read_text() != text}
    if stale:
        for path, text in stale.items():
            _write(path, text)
            changes.append(f"wrote {path}")
        _systemctl("daemon-reload")
        restarted = _is_active()
        _systemctl("enable", UNIT_NAME)
        _systemctl("restart" if restarted else "start", "--no-block", UNIT_NAME)
        changes.append(
            f"{'restarted' if restarted else 'started'} {UNIT_NAME}; jobs that run are not touched"
        )
    elif not _is_active():
        _systemctl("enable", UNIT_NAME)
        _systemctl("start", "--no-block", UNIT_NAME)
        changes.append(f"started {UNIT_NAME}")
    for change in changes:
        say(change)
    return Done(tuple(changes))


def uninstall(config_path: str, say: Callable[[str], None], *, force: bool) -> Done:
    """Removes the daemon; the configuration, the account and jobs' output stay. Raises UserError while jobs run here,
    unless force."""
    _need_root_and_systemd()
    changes = []
    units = SystemdUnits()
    jobs = [unit.job_id for unit in units.found() if unit.is_alive]
    if jobs and not force:
        raise UserError(
            f"jobs run here: {', '.join(jobs)}; drain the node first, or say --force, which kills them"
        )
    if Path(UNIT_PATH).exists():
        _systemctl("disable", "--now", UNIT_NAME)
        Path(UNIT_PATH).unlink()
        Path(SLICE_PATH).unlink(missing_ok=True)
        _systemctl("daemon-reload")
        changes.append(f"stopped and removed {UNIT_NAME} and {SLICE}")
    for unit in units.found():
        if unit.is_alive:
            units.kill(unit.job_id)
            changes.append(f"killed {PREFIX}{unit.job_id}")
        units.forget(unit.job_id)
    for change in changes:
        say(change)
    return Done(tuple(changes))


def _make_directories(config: AgentConfig) -> list[str]:
    """Makes the daemon's directories, except those that systemd makes for the unit, and returns a line for each that
    was made. Raises UserError."""
    made = []
    for directory, mode in ((config.directories_state, 0o700), (config.directories_log, 0o751)):
        path = Path(directory)
        if made_by_systemd(directory) or path.is_dir():
            continue
        try:
            path.mkdir(parents=True)
            path.chmod(mode)
        except OSError as error:
            raise UserError(f"directory {directory!r} can't be made: {error.strerror or error}") from error
        made.append(f"made {directory}")
    return made


def _need_root_and_systemd() -> None:
    if os.geteuid() != 0:
        raise UserError("only root can install a service; use sudo")
    if not is_there():
        raise UserError(
            "this machine was not booted by systemd; run `bagua-agent serve` by what it has instead"
        )


def _program() -> str:
    beside = Path(sys.executable).with_name("bagua-agent")
    found = str(beside) if beside.exists() else shutil.which("bagua-agent")
    if found is None:
        raise UserError(f"no bagua-agent beside {sys.executable}; install the package there with pip")
    if not _PROGRAM.fullmatch(found):
        raise UserError(
            f"{found!r} can't stand in a unit file; install bagua under a path without blanks, as /opt/bagua"
        )
    return found


def _make_account(config: AgentConfig) -> list[str]:
    name = config.jobs_default_user
    try:
        pwd.getpwnam(name)
    except KeyError:
        _run(["useradd", "--system", "--create-home", "--shell", "/usr/sbin/nologin", name])
        return [f"made account {name}"]
    return []


def daemon_is_active() -> bool:
    return is_there() and _is_active()


def _is_active() -> bool:
    done = subprocess.run(
        ["systemctl", "is-active", "--quiet", UNIT_NAME], timeout=COMMAND_TIMEOUT_S, check=False
    )
    return done.returncode == 0


def _systemctl(*words: str) -> None:
    _run(["systemctl", *words])


def _run(line: list[str]) -> None:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfrastructureLost(f"{' '.join(line)}: {error}") from error
    if done.returncode != 0:
        raise InfrastructureLost(f"{' '.join(line)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def _write(path: Path, text: str) -> None:
    """Writes the file as a whole or not at all."""
    unfinished = path.with_name(path.name + ".new")
    unfinished.write_text(text)
    unfinished.chmod(0o644)
    unfinished.rename(path)
