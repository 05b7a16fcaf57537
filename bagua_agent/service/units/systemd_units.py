"""Runs units as transient systemd services, each with a control group that ends whole, and a journal.

A service stays known after its agent has ended (RemainAfterExit, or failed), so that a daemon that was away learns how.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost, OutcomeUnknown
from bagua_agent.cluster.cluster_policy import ClusterPolicy
from bagua_agent.service.units.units import NOT_KNOWN, FoundUnit, read_note, unit_command

PREFIX = "bagua-job-"
SLICE = "bagua.slice"
COMMAND_TIMEOUT_S = 20.0
_SHOWN = ("Id", "ActiveState", "SubState", "MainPID", "ExecMainPID", "ExecMainCode", "ExecMainStatus")
_EXITED, _BY_SIGNAL = 1, (2, 3)  # of si_code: CLD_EXITED, CLD_KILLED and CLD_DUMPED

PROPERTIES = (
    "Type=exec",
    "RemainAfterExit=yes",
    # A shutdown of the host sends SIGTERM to the agent alone, whose workers leave at a step boundary, and SIGKILL to
    # what is left once the agent has ended.
    "KillMode=mixed",
    f"Slice={SLICE}",
    "TasksMax=80%",  # of the host's, so that a job that forks without end leaves the daemon threads and processes
    "LimitNOFILE=1048576",
    "LimitMEMLOCK=infinity",  # pinned memory, and RDMA
    "OOMPolicy=continue",  # one worker that is killed is a loss, not the end of the unit
    "UMask=0022",
)


def is_there() -> bool:
    """Tells whether this machine was booted by systemd."""
    return Path("/run/systemd/system").is_dir()


def name_of(job_id: str) -> str:
    return f"{PREFIX}{job_id}.service"


def properties(memory_max: str, stop_timeout_s: float) -> tuple[str, ...]:
    """Returns the systemd properties of a job's unit. memory_max: of all its processes together; empty: no limit.
    stop_timeout_s: from SIGTERM to SIGKILL at a shutdown of the host."""
    own = (f"TimeoutStopSec={max(1, math.ceil(stop_timeout_s))}",)  # 0 would be no limit
    return (*PROPERTIES, *own, f"MemoryMax={memory_max}") if memory_max else (*PROPERTIES, *own)


class SystemdUnits:
    """Runs units as transient systemd services. kill_grace_s: the time that a job's agent has beyond the job's own
    shutdown timeout."""

    def __init__(self, memory_max: str = "", kill_grace_s: float = ClusterPolicy().kill_grace_s) -> None:
        self._memory_max = memory_max
        self._kill_grace_s = kill_grace_s

    def start(self, job_id: str, folder: Path) -> None:
        self.forget(job_id)  # one of this name that has ended
        stop_timeout_s = read_note(folder).shutdown_timeout_s + self._kill_grace_s
        options = [word for value in properties(self._memory_max, stop_timeout_s) for word in ("-p", value)]
        line = ["systemd-run", "--quiet", f"--unit={name_of(job_id)}", f"--description=bagua job {job_id}"]
        _call([*line, *options, "--", *unit_command(folder)], f"start job {job_id!r}")

    def found(self) -> list[FoundUnit]:
        shown = _call(
            ["systemctl", "show", "--all", f"--property={','.join(_SHOWN)}", f"{PREFIX}*.service"],
            "list units",
        )
        blocks = [
            dict(line.split("=", 1) for line in block.splitlines()) for block in shown.split("\n\n") if block
        ]
        return [unit for block in blocks if (unit := read_unit(block)) is not None]

    def ask_to_leave(self, job_id: str) -> None:
        # Before systemd 252 the option had this name alone; later ones take it as a short form of --kill-whom.
        line = ["systemctl", "kill", "--kill-who=main", "--signal=SIGTERM", name_of(job_id)]
        _call(line, f"ask job {job_id!r}")

    def kill(self, job_id: str) -> None:
        _call(["systemctl", "kill", "--signal=SIGKILL", name_of(job_id)], f"kill job {job_id!r}")

    def forget(self, job_id: str) -> None:
        # Both say so if there is no such unit, which is what is wanted.
        _call(["systemctl", "stop", name_of(job_id)], f"end job {job_id!r}", may_fail=True)
        _call(["systemctl", "reset-failed", name_of(job_id)], f"forget job {job_id!r}", may_fail=True)


def read_unit(shown: Mapping[str, str]) -> FoundUnit | None:
    """Returns the unit that the properties shown by systemctl describe; None if there is none, or it is not ours.
    Pure."""
    name = shown.get("Id", "")
    if not (name.startswith(PREFIX) and name.endswith(".service")):
        return None
    job_id = name.removeprefix(PREFIX).removesuffix(".service")
    active, sub = shown.get("ActiveState"), shown.get("SubState")
    if active == "inactive" and shown.get("ExecMainPID", "0") == "0":
        return None
    if active in ("activating", "deactivating", "reloading") or (active == "active" and sub != "exited"):
        return FoundUnit(job_id, _number(shown, "MainPID"), None)
    code, status = _number(shown, "ExecMainCode"), _number(shown, "ExecMainStatus")
    if code == _EXITED:
        return FoundUnit(job_id, 0, status)
    return FoundUnit(job_id, 0, 128 + status if code in _BY_SIGNAL else NOT_KNOWN)


def _number(shown: Mapping[str, str], name: str) -> int:
    text = shown.get(name, "")
    return int(text) if text.isdecimal() else 0


def _call(line: Sequence[str], what: str, *, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OutcomeUnknown(
            f"systemd did not {what} within {COMMAND_TIMEOUT_S:g} s, or did not say so"
        ) from error
    except OSError as error:
        raise InfrastructureLost(f"systemd did not {what}: {error}") from error
    if done.returncode != 0 and not may_fail:
        raise InfrastructureLost(
            f"systemd did not {what}: {done.stderr.strip() or f'exit {done.returncode}'}"
        )
    return done.stdout
