"""A file that workers' output is appended to. A disk that fails ends the log, never the training."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from bagua_agent.errors import host_error
from bagua_agent.workers.account import Account
from bagua_agent.workers.log_access import open_file

log = logging.getLogger(__name__)


class LogFile:
    """account: whose workers print there. Its directory must exist. Used by one thread at a time.

    Raises UserError or InfrastructureLost when the file cannot be opened.
    """

    def __init__(self, path: Path, account: Account | None = None) -> None:
        self._path = path
        try:
            self._fd = open_file(path, account)
        except OSError as error:
            raise host_error(error, f"cannot write {path}", "check --log-dir") from error

    def write(self, data: bytes) -> None:
        """All of data, unless a write failed before: that is said once and ends the file."""
        view = memoryview(data)
        while view and self._fd >= 0:
            try:
                view = view[os.write(self._fd, view) :]
            except OSError as error:
                log.error("%s is not written any further: %s", self._path, error.strerror)
                self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
