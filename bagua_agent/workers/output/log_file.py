"""A file that workers' output is appended to, of bounded size: the newest output is kept, in at most two parts.

A disk that fails ends the log, never the training. Names of the parts are in log_parts.py.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from bagua_agent.base.errors import host_error
from bagua_agent.workers.output.log_access import open_file
from bagua_agent.workers.output.log_parts import part_ends, part_path
from bagua_agent.workers.process.account import Account

log = logging.getLogger(__name__)

MOST_FOUND_BYTES = 1 << 50  # of a file that was there, whatever size it has been given


class LogFile:
    """Appends to a log file and rotates it. Its directory must exist. Used by one thread at a time.

    account: whose workers print there. most_bytes: of both parts together; 0: no bound. Raises UserError or
    InfrastructureLost when the file cannot be opened.
    """

    def __init__(self, path: Path, account: Account | None = None, most_bytes: int = 0) -> None:
        self._path = path
        self._account = account
        self._part_bytes = most_bytes // 2
        self._removed_some = False
        try:
            self._fd = open_file(path, account)
            self._written_bytes = min(os.fstat(self._fd).st_size, MOST_FOUND_BYTES)  # of this part
        except OSError as error:
            raise host_error(error, f"cannot write {path}", "check --log-dir") from error

    def write(self, data: bytes) -> None:
        """Writes all of data, unless a write failed before. A failure is logged once and ends the file."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                fits = self._fitting(view)
                if fits:
                    done = os.write(self._fd, view[:fits])
                    self._written_bytes += done
                    view = view[done:]
                else:
                    self._rotate()
            except OSError as error:
                log.error("%s is not written any further: %s", self._path, error.strerror)
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _fitting(self, view: memoryview) -> int:
        """Returns how many of the bytes go into the part being written, in whole lines if it is not empty. 0: another
        part is due."""
        if not self._part_bytes:
            return len(view)
        # The account owns the file, and may have made it longer or shorter.
        size = max(self._written_bytes, os.fstat(self._fd).st_size)
        room = self._part_bytes - size
        if len(view) <= room:
            return len(view)
        lines = bytes(view[: max(0, room)]).rfind(b"\n") + 1
        return lines or (0 if size else room)

    def _rotate(self) -> None:
        """Renames the file, removes the older parts and opens a new one. Raises OSError. Positions count what this
        agent wrote, whatever others did to the file."""
        ends = part_ends(self._path)
        os.rename(self._path, part_path(self._path, (ends[-1] if ends else 0) + self._written_bytes))
        for old in ends:  # before the new one: a full disk has room for it then
            os.unlink(part_path(self._path, old))
        os.close(self._fd)
        self._fd = -1
        self._fd = open_file(self._path, self._account)
        self._written_bytes = 0
        if ends and not self._removed_some:
            self._removed_some = True
            log.warning(
                "%s has reached its bound: the newest %d MiB of this stream are kept, older output is removed; "
                "raise --max-log-mib, or jobs.max_log_mib of a daemon, to keep more",
                self._path,
                2 * self._part_bytes >> 20,
            )
