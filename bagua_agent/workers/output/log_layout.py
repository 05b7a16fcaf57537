"""Paths of the files about a worker.

    <log_dir>/<job_id>/<node_name>/slot<k>-<worker_id>/{stdout.log, stderr.log, error.json}
    <log_dir>/<job_id>/<node_name>/{filtered_stdout.log, filtered_stderr.log}

A log that has grown has an older part beside it (log_parts.py).
A worker that takes a slot over has another id, so nothing is overwritten. Owns names only, no content.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import UserError, host_error
from bagua_agent.base.plain_text import in_utf8
from bagua_agent.workers.output.log_access import make_directories
from bagua_agent.workers.process.account import Account

COMPONENT_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    directory: Path

    @property
    def stdout(self) -> Path:
        return self.directory / "stdout.log"

    @property
    def stderr(self) -> Path:
        return self.directory / "stderr.log"

    @property
    def error(self) -> Path:
        return self.directory / "error.json"

    @property
    def shown(self) -> str:
        """The directory as it is shown to people, in UTF-8; empty while there is no file in it."""
        try:
            return in_utf8(str(self.directory)) if any(self.directory.iterdir()) else ""
        except OSError:
            return ""


@dataclass(frozen=True, slots=True)
class LogLayout:
    """The paths of the files of one node in one job."""

    log_dir: Path
    job_id: str
    node_name: str
    account: Account | None = None  # the workers'; None: the agent's own

    @property
    def node_directory(self) -> Path:
        return self.log_dir / path_component(self.job_id) / path_component(self.node_name)

    @property
    def filtered_stdout(self) -> Path:
        return self.node_directory / "filtered_stdout.log"

    @property
    def filtered_stderr(self) -> Path:
        return self.node_directory / "filtered_stderr.log"

    def worker_files(self, slot: int, worker_id: str) -> WorkerFiles:
        return WorkerFiles(self.node_directory / f"slot{slot}-{path_component(worker_id)}")

    def make_worker_directory(self, slot: int, worker_id: str) -> WorkerFiles:
        """Makes the directory of a worker and returns the paths of its files. Raises UserError or InfrastructureLost
        when the log directory cannot be written."""
        files = self.worker_files(slot, worker_id)
        self._make(files.directory)
        return files

    def make_node_directory(self) -> None:
        """Makes the directory of this node's files. Raises UserError or InfrastructureLost when the log directory
        cannot be written."""
        self._make(self.node_directory)

    def _make(self, directory: Path) -> None:
        try:
            make_directories(directory, self.log_dir, self.account)
        except OSError as error:
            raise host_error(error, f"cannot make {directory}", "check --log-dir") from error


def open_log_dir(log_dir: str | None) -> Path:
    """Returns the directory of --log-dir, made if missing; a private temporary one if none is given.

    Raises UserError.
    """
    if not log_dir:
        return Path(tempfile.mkdtemp(prefix="bagua-"))
    path = Path(log_dir).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"--log-dir {log_dir!r} is not a directory; give another") from None
    except OSError as error:
        raise UserError(f"--log-dir {log_dir!r} cannot be made: {error.strerror}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"--log-dir {log_dir!r} cannot be written; check its permissions")
    return path


def path_component(text: str) -> str:
    """Returns `text` as one safe name in a path: nothing that climbs out of its directory."""
    safe = re.sub(r"[^\w.@=+-]", "_", text)[:COMPONENT_CHARACTERS]
    return safe if safe.strip(".") else "_" + safe
