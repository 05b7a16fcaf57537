"""What have a job's workers written on this node? Finds their files and reads them, whoever wrote what into them.

Names come from strangers, so nothing of them is followed: a name is one component of a path, a file must be an
ordinary one and no link.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.errors import UserError
from bagua_agent.store.keys import check_id
from bagua_agent.workers.log_layout import LogLayout, WorkerFiles

CHUNK_BYTES = 64 * 1024
LOOK_AGAIN_S = 0.2

_WORKER = re.compile(r"slot[0-9]+-[\w.@=+-]+")


@dataclass(frozen=True, slots=True)
class WorkerLogFiles:
    directory: str
    stdout_bytes: int
    stderr_bytes: int


class JobLogs:
    """log_dir, node_name: as the node's units write."""

    def __init__(self, log_dir: Path, node_name: str) -> None:
        self._log_dir = log_dir
        self._node_name = node_name

    def list(self, job_id: str) -> list[WorkerLogFiles]:
        """Oldest first; none for a job that was never here. Raises UserError for an id that can't be."""
        folder = self._folder(job_id)
        try:
            entries = [
                e for e in os.scandir(folder) if _WORKER.fullmatch(e.name) and e.is_dir(follow_symlinks=False)
            ]
        except OSError:
            return []
        entries.sort(key=lambda e: (e.stat(follow_symlinks=False).st_mtime_ns, e.name))
        found = []
        for entry in entries:
            files = WorkerFiles(Path(entry.path))
            found.append(WorkerLogFiles(entry.name, _size(files.stdout), _size(files.stderr)))
        return found

    def read(
        self,
        job_id: str,
        directory: str,
        *,
        stderr: bool,
        last_bytes: int,
        goes_on: Callable[[float], bool],
        from_bytes: int = 0,
    ) -> Iterator[bytes]:
        """Chunks from the beginning, after the first from_bytes, or the last last_bytes. At the end of the file
        goes_on(seconds) says, after that time at most, whether more may come. Raises UserError if there is no such
        file."""
        if not _WORKER.fullmatch(directory):
            raise UserError(f"{directory[:100]!r} is no worker's directory; `bagua-launch logs` lists them")
        files = WorkerFiles(self._folder(job_id) / directory)
        path = files.stderr if stderr else files.stdout
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(
                f"job {job_id!r} has no {path.name} of {directory} here: {error.strerror}"
            ) from error
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path.name} of {directory} is no ordinary file")
            if from_bytes:
                file.seek(from_bytes)
            elif last_bytes:
                file.seek(max(0, status.st_size - last_bytes))
            more = True
            while True:
                while data := file.read(CHUNK_BYTES):
                    yield data
                if not more:
                    return
                more = goes_on(LOOK_AGAIN_S)  # and once more to the end after it said no

    def _folder(self, job_id: str) -> Path:
        return LogLayout(self._log_dir, check_id("job", job_id), self._node_name).node_directory


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
