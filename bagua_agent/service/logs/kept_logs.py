"""Records to which submission a job's logs on this node belong, and removes them with it or after its replacement.

Names of jobs are used again, so a name alone does not identify the owner of logs. The records are in the daemon's own
state directory, one file for each job.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from bagua_agent.base.errors import InfrastructureLost
from bagua_agent.base.ids import is_id
from bagua_agent.etcd.keys import check_id
from bagua_agent.workers.output.log_layout import LogLayout

LONGEST_NONCE = 100


def owners_folder(state_directory: str) -> Path:
    return Path(state_directory) / "log-owners"


class KeptLogs:
    """The jobs' logs on this node, with the submission that each belongs to. Blocking; from one thread. owners: the
    folder of the records. log_dir, node_name: as units write."""

    def __init__(self, owners: Path, log_dir: Path, node_name: str) -> None:
        self._owners = owners
        self._log_dir = log_dir
        self._node_name = node_name

    def begin(self, job_id: str, nonce: str) -> None:
        """Records that a unit of this submission is about to write here, and removes the logs of an earlier submission
        of its name.

        Raises InfrastructureLost.
        """
        owner = self._owner(job_id)
        if owner == nonce:
            return
        try:
            if owner:
                self._remove_directory(job_id)
            self._owners.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file(job_id).write_text(nonce)
        except OSError as error:
            raise InfrastructureLost(
                f"job {job_id!r} can't begin here: its log directory can't be made its own: {error}"
            ) from error

    def remove(self, job_id: str, nonce: str) -> bool:
        """Removes the logs of this submission, and returns whether there were any. Raises InfrastructureLost."""
        if self._owner(job_id) != nonce:
            return False
        try:
            found = self._remove_directory(job_id)
            self._file(job_id).unlink(missing_ok=True)
        except OSError as error:
            raise InfrastructureLost(
                f"job {job_id!r} was removed and its logs on this node are not: {error}; remove them by hand"
            ) from error
        return found

    def tidy(
        self, known: Collection[tuple[str, str]], kept_s: float, now_unix_s: float
    ) -> tuple[list[str], list[tuple[str, str]]]:
        """Removes the logs of submissions that were last known more than kept_s ago. Returns the jobs whose logs are
        removed, and those whose logs can't be, with the reason.

        known: jobs with the nonces of submissions; an empty nonce is any submission's. The time of a record is when its
        submission was known last, so it outlives this process.
        """
        removed: list[str] = []
        refused: list[tuple[str, str]] = []
        names = {job_id for job_id, _ in known}
        for path in sorted(p for p in self._owners.glob("*") if is_id(p.name)):
            job_id, owner = path.name, self._owner(path.name)
            is_known = (job_id, owner) in known or (job_id, "") in known or (not owner and job_id in names)
            try:
                if is_known:
                    os.utime(path, (now_unix_s, now_unix_s))
                elif now_unix_s - path.stat().st_mtime > kept_s:
                    if self._remove_directory(job_id):
                        removed.append(job_id)
                    path.unlink()
            except OSError as error:
                refused.append((job_id, str(error)))
        return removed, refused

    def _owner(self, job_id: str) -> str:
        """Returns the nonce of the submission to which the job's logs belong; empty if none is known."""
        try:
            with self._file(job_id).open() as file:
                return file.read(LONGEST_NONCE)
        except (OSError, ValueError):
            return ""

    def _file(self, job_id: str) -> Path:
        return self._owners / check_id("job", job_id)

    def _remove_directory(self, job_id: str) -> bool:
        directory = LogLayout(self._log_dir, job_id, self._node_name).node_directory
        for path in (directory.parent, directory):
            try:
                status = os.lstat(path)
            except FileNotFoundError:
                return False
            # where others may make directories, one of theirs may lead anywhere
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is not the agent's own directory", str(path))
        shutil.rmtree(directory)
        with suppress(OSError):  # other nodes' logs lie there too, where the directory is shared
            directory.parent.rmdir()
        return True
