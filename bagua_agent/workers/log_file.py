"""A file that workers' output is appended to. A disk that fails ends the log, never the training."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from bagua_agent.errors import host_error

log = logging.getLogger(__name__)


class LogFile:
    """Raises UserError or InfrastructureLost when the file cannot be opened. Used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
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
