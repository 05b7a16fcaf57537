"""The interface to units. A unit is a job agent that runs beside the daemon and outlives it.

Separates the decisions (cluster/unit_plan.py) from systemd and plain processes. A unit is identified by its job, so a
daemon that starts again finds the units of the one before. A unit's files are in a folder of its own that only root can
read: no secret is in a command line or in a property that others can read.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bagua_agent.base.errors import UserError
from bagua_agent.config.job_config import JobConfig
from bagua_agent.config.job_config_file import decode, encode
from bagua_agent.etcd.keys import check_id

REQUEST = "request.json"
NOTE = "note.json"
ASKED = "asked-to-leave"
REASON = "reason"
METRICS = "metrics"  # HOST:PORT at which its agent serves them
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # of agents and workers
LEFT_CHARACTERS = 1000  # that are read of a file; reasons travel in the node's record
NOT_KNOWN = 128 + 9
"""Exit code of one that ended without a report: killed."""


@dataclass(frozen=True, slots=True)
class UnitRequest:
    """The request for a unit. environment: the whole of its workers', but for their own variables; nothing of it is the
    agent's."""

    config: JobConfig
    environment: Mapping[str, str]
    directory: str


@dataclass(frozen=True, slots=True)
class UnitNote:
    """The note that the daemon that starts a unit leaves for itself, or for its successor.

    order: number of the order it follows. failures: in a row before this start. shutdown_timeout_s: the job's own.
    nonce: of the submission. started_unix_s: when it started; 0: not known, as of an earlier version.
    """

    order: int = 0
    slots: tuple[int, ...] = ()
    failures: int = 0
    shutdown_timeout_s: float = 0.0
    nonce: str = ""
    started_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FoundUnit:
    """A unit that a runner found. pid: of its agent, 0 once that has ended. exit_code: as a shell reports it; None
    while it runs."""

    job_id: str
    pid: int
    exit_code: int | None

    @property
    def is_alive(self) -> bool:
        return self.exit_code is None


class UnitRunner(Protocol):
    """Runs units, by blocking calls that are each bounded. Raises InfrastructureLost if what runs the units does not do
    as asked."""

    def start(self, job_id: str, folder: Path) -> None:
        """Runs what `folder` asks for (UnitFolders.make)."""

    def found(self) -> list[FoundUnit]:
        """Returns all units, those that have ended included until they are forgotten."""

    def ask_to_leave(self, job_id: str) -> None:
        """Sends SIGTERM to the unit's agent alone."""

    def kill(self, job_id: str) -> None:
        """Sends SIGKILL to every process of the unit."""

    def forget(self, job_id: str) -> None:
        """Ends what is left of a unit whose agent has ended; it is found no more."""


def unit_command(folder: Path) -> list[str]:
    """Returns the command that a unit executes. It is isolated: nothing of a job's environment is read before the job's
    own account is taken."""
    return [sys.executable, "-P", "-m", "bagua_agent.service.units.run_unit", str(folder)]


def units_folder(state_directory: str) -> Path:
    return Path(state_directory) / "units"


class UnitFolders:
    """Keeps one folder for each job in `parent`, with mode 0700."""

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        parent.chmod(0o700)

    def of(self, job_id: str) -> Path:
        return self._parent / check_id("job", job_id)

    def make(self, request: UnitRequest, note: UnitNote) -> Path:
        """Makes a fresh folder for a new start; what an earlier start left is removed."""
        folder = self.of(request.config.job_id)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        _write(folder / NOTE, {**asdict(note), "slots": list(note.slots)})
        wanted = {
            "config": encode(request.config),
            "environment": dict(request.environment),
            "directory": request.directory,
        }
        _write(folder / REQUEST, wanted)
        return folder

    def note(self, job_id: str) -> UnitNote:
        """Returns what was left at the unit's start; an empty note where a daemon was killed between two writes."""
        return read_note(self.of(job_id))

    def mark_asked(self, job_id: str) -> None:
        """Records that the unit is asked to leave: a daemon that starts again must not ask a second time."""
        (self.of(job_id) / ASKED).touch(0o600)

    def unmark_asked(self, job_id: str) -> None:
        """Removes the record that the unit was asked to leave, because asking failed."""
        # What can't be removed says at worst that it was asked: then it is killed in the end
        with suppress(OSError):
            (self.of(job_id) / ASKED).unlink()

    def was_asked(self, job_id: str) -> bool:
        return (self.of(job_id) / ASKED).exists()

    def reasons(self) -> dict[str, str]:
        """Returns, by job, the errors that ended agents, as far as the agents could report them."""
        return self._left(REASON)

    def metrics_addresses(self) -> dict[str, str]:
        """Returns, by job, HOST:PORT at which the agent serves metrics, or did before it ended."""
        return self._left(METRICS)

    def _left(self, name: str) -> dict[str, str]:
        """Returns, by job, what its agent left in this file."""
        found = {}
        for path in self._parent.glob(f"*/{name}"):
            with suppress(OSError, ValueError), path.open() as file:
                found[path.parent.name] = file.read(LEFT_CHARACTERS)
        return found

    def remove(self, job_id: str) -> None:
        shutil.rmtree(self.of(job_id), ignore_errors=True)


def read_note(folder: Path) -> UnitNote:
    """Returns the note of a folder; an empty one if there is none, or none that can be read."""
    try:
        read = json.loads((folder / NOTE).read_text())
        return UnitNote(
            order=int(read["order"]),
            slots=tuple(map(int, read["slots"])),
            failures=int(read["failures"]),
            shutdown_timeout_s=float(read["shutdown_timeout_s"]),
            # an earlier version's note has neither
            nonce=str(read.get("nonce", "")),
            started_unix_s=float(read.get("started_unix_s", 0.0)),
        )
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return UnitNote()


def read_request(folder: Path) -> UnitRequest:
    """Reads the request of a folder. Raises UserError if it can't be read."""
    path = folder / REQUEST
    try:
        read = json.loads(path.read_text())
        return UnitRequest(decode(read["config"]), dict(read["environment"]), str(read["directory"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} can't be read ({type(error).__name__}: {error}); the daemon writes it"
        ) from error


def _write(path: Path, content: Mapping[str, object]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
