"""Runs units without systemd: as processes in sessions of their own, which outlive the daemon.

Each records itself in its folder and holds a lock there (unit_process.py), so a daemon that starts again finds it,
whenever the one before was killed. The agent's guardian ends processes that its agent can't reach, except one that
left its session and wiped its environment: only a control group contains such a process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.service.units.run_unit import EXIT_CODE, RECORD_PROCESS
from bagua_agent.service.units.unit_process import (
    UnitProcess,
    forget_process,
    is_locked,
    recorded_process,
    started_at,
    take_lock,
)
from bagua_agent.service.units.units import NOT_KNOWN, FoundUnit, unit_command

OUTPUT = "agent.log"


class ChildUnits:
    """Runs units as processes in sessions of their own. folders: where UnitFolders keeps them."""

    def __init__(self, folders: Path) -> None:
        self._folders = folders
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job_id: str, folder: Path) -> None:
        try:
            lock = take_lock(folder)
            try:
                with (folder / OUTPUT).open("ab") as output:
                    self._children[job_id] = subprocess.Popen(
                        [*unit_command(folder), RECORD_PROCESS],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        cwd="/",
                        pass_fds=(lock,),
                    )
            finally:
                os.close(lock)
        except OSError as error:
            raise InfrastructureLost(f"job {job_id!r} can't be started: {error}") from error

    def found(self) -> list[FoundUnit]:
        if not self._folders.is_dir():
            return []
        units = []
        for folder in sorted(self._folders.iterdir()):
            child = self._children.get(folder.name)
            if child is not None:
                child.poll()  # or it would stay a zombie, and seem alive
            process = self._process(folder)
            if process is not None and process.is_alive:
                units.append(FoundUnit(folder.name, process.pid, None))
            elif process is None and is_locked(folder):
                units.append(FoundUnit(folder.name, 0, None))  # it is about to record itself
            elif process is not None or child is not None:
                units.append(FoundUnit(folder.name, 0, _exit_code(folder, child)))
            # else a daemon was killed before it started anything
        return units

    def ask_to_leave(self, job_id: str) -> None:
        self._signal(job_id, signal.SIGTERM, group=False)

    def kill(self, job_id: str) -> None:
        self._signal(job_id, signal.SIGKILL, group=True)

    def forget(self, job_id: str) -> None:
        self._children.pop(job_id, None)
        forget_process(self._folders / job_id)

    def _process(self, folder: Path) -> UnitProcess | None:
        """Returns the unit's recorded process, or our own child that has not recorded itself yet."""
        recorded = recorded_process(folder)
        child = self._children.get(folder.name)
        if recorded is not None or child is None:
            return recorded
        started = started_at(child.pid)
        return None if started is None else UnitProcess(child.pid, started)

    def _signal(self, job_id: str, number: signal.Signals, *, group: bool) -> None:
        folder = self._folders / job_id
        process = self._process(folder)
        if process is None and is_locked(folder):
            raise InfrastructureLost(
                f"job {job_id!r}: its unit is starting and can't be sent {number.name} yet"
            )
        if process is None or not process.is_alive:
            return
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(process.pid, number)


def _exit_code(folder: Path, child: subprocess.Popen[bytes] | None) -> int:
    if child is not None and child.returncode is not None:
        return child.returncode if child.returncode >= 0 else 128 - child.returncode
    try:
        return int((folder / EXIT_CODE).read_text())
    except (OSError, ValueError):
        return NOT_KNOWN
