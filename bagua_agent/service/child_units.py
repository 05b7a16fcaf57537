"""How are units run where there is no systemd? As processes in sessions of their own, which outlive the daemon.

What is in one beyond its agent's reach is ended by the agent's guardian; a process that left its session and wiped its
environment is not: only a control group holds such a one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path

from bagua_agent.errors import InfrastructureLost
from bagua_agent.service.run_unit import EXIT_CODE
from bagua_agent.service.units import NOT_KNOWN, FoundUnit, unit_command

PROCESS = "process.json"
OUTPUT = "agent.log"


class ChildUnits:
    """folders: where UnitFolders keeps them."""

    def __init__(self, folders: Path) -> None:
        self._folders = folders
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job_id: str, folder: Path) -> None:
        try:
            with (folder / OUTPUT).open("ab") as output:
                child = subprocess.Popen(
                    unit_command(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            raise InfrastructureLost(f"job {job_id!r} can't be started: {error}") from error
        self._children[job_id] = child
        started = {"pid": child.pid, "started": _started(child.pid)}
        (folder / PROCESS).write_text(json.dumps(started))

    def found(self) -> list[FoundUnit]:
        if not self._folders.is_dir():
            return []
        units = []
        for folder in sorted(self._folders.iterdir()):
            pid, started = _process_of(folder)
            if pid is None:
                continue  # a daemon that was killed before it started anything
            child = self._children.get(folder.name)
            if child is not None:
                child.poll()  # or it would stay a zombie, and seem alive
            alive = _started(pid) == started
            units.append(
                FoundUnit(folder.name, pid if alive else 0, None if alive else _exit_code(folder, child))
            )
        return units

    def ask_to_leave(self, job_id: str) -> None:
        self._signal(job_id, signal.SIGTERM, group=False)

    def kill(self, job_id: str) -> None:
        self._signal(job_id, signal.SIGKILL, group=True)

    def forget(self, job_id: str) -> None:
        self._children.pop(job_id, None)
        (self._folders / job_id / PROCESS).unlink(missing_ok=True)

    def _signal(self, job_id: str, number: signal.Signals, *, group: bool) -> None:
        pid, started = _process_of(self._folders / job_id)
        if pid is None or _started(pid) != started:
            return
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(pid, number)


def _process_of(folder: Path) -> tuple[int | None, int | None]:
    """Process id and start of its agent, as they were written."""
    try:
        read = json.loads((folder / PROCESS).read_text())
        return int(read["pid"]), int(read["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, None


def _started(pid: int) -> int | None:
    """When this process began, in ticks since boot; None if it is over. Tells it from another of its number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _exit_code(folder: Path, child: subprocess.Popen[bytes] | None) -> int:
    if child is not None and child.returncode is not None:
        return child.returncode if child.returncode >= 0 else 128 - child.returncode
    try:
        return int((folder / EXIT_CODE).read_text())
    except (OSError, ValueError):
        return NOT_KNOWN
