"""Finds and reads the files that a job's workers wrote on this node, whatever they contain.

Names are untrusted: a name must be one component of a path, a file must be an ordinary one and no link. Positions count
the bytes of the whole stream, also of removed parts (`log_parts.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bagua_agent.base.errors import UserError
from bagua_agent.etcd.keys import check_id
from bagua_agent.workers.output.log_layout import LogLayout, WorkerFiles
from bagua_agent.workers.output.log_parts import Piece, extent, read_piece

CHUNK_BYTES = 64 * 1024
LOOK_AGAIN_S = 0.2

_WORKER = re.compile(r"slot[0-9]+-[\w.@=+-]+")


@dataclass(frozen=True, slots=True)
class WorkerLogFiles:
    """A worker's log files on this node. Bytes: written so far, whether they are kept or not."""

    directory: str
    stdout_bytes: int
    stderr_bytes: int


class JobLogs:
    """The logs of the jobs on this node. log_dir, node_name: as the node's units write."""

    def __init__(self, log_dir: Path, node_name: str) -> None:
        self._log_dir = log_dir
        self._node_name = node_name

    def list(self, job_id: str) -> list[WorkerLogFiles]:
        """Returns the workers' log files of a job, oldest first; none for a job that was never here. Raises UserError
        for an id that no job can have."""
        folder = self._folder(job_id)
        ages = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if _WORKER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # removed meanwhile: see earlier_logs.py
                            ages.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
        except OSError:
            return []
        found = []
        for _, name in sorted(ages):
            files = WorkerFiles(folder / name)
            found.append(WorkerLogFiles(name, _size(files.stdout), _size(files.stderr)))
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
    ) -> Iterator[Piece]:
        """Yields the pieces of a worker's log, from the oldest that is kept on, after the first from_bytes, or the last
        last_bytes. At the end of what is written, goes_on(seconds) returns, after that time at most, whether more may
        come. Raises UserError if there is no such file."""
        if not _WORKER.fullmatch(directory):
            raise UserError(f"{directory[:100]!r} is no worker's directory; `bagua-launch logs` lists them")
        files = WorkerFiles(self._folder(job_id) / directory)
        path = files.stderr if stderr else files.stdout
        position = from_bytes
        try:
            if last_bytes and not from_bytes:
                position = max(0, extent(path)[1] - last_bytes)
            more = True
            while True:
                while (piece := read_piece(path, position, CHUNK_BYTES)).data:
                    yield piece
                    position = piece.position + len(piece.data)
                if not more:
                    return
                more = goes_on(LOOK_AGAIN_S)  # and once more to the end after it said no
        except OSError as error:
            raise UserError(
                f"job {job_id!r} has no {path.name} of {directory} here: {error.strerror}"
            ) from error

    def _folder(self, job_id: str) -> Path:
        return LogLayout(self._log_dir, check_id("job", job_id), self._node_name).node_directory


def _size(path: Path) -> int:
    try:
        return extent(path)[1]
    except OSError:
        return 0
