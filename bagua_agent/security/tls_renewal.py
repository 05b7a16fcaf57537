"""Reads renewed certificates from their files, so that a renewal needs no restart.

While the files can't be used (half renewed, expired, of another authority, open to others), the certificates that were
read before remain in force. The files are read again each time until they can be used: the fault may lie outside of
them (a permission, the clock, the disk).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from datetime import datetime

from bagua_agent.base.errors import UserError
from bagua_agent.security.certificate_files import TlsContents, TlsFiles, read_tls, utc_now

_log = logging.getLogger(__name__)

# Of each file: inode, size, mode, times of change of its content and of the rest
_Marks = tuple[tuple[int, ...], ...]


class RenewedTls:
    """The files of one side, which are read again when they changed. Thread-safe."""

    def __init__(self, files: TlsFiles, now: Callable[[], datetime] = utc_now) -> None:
        """Reads the files. Raises UserError if they can't be used."""
        self._files = files
        self._now = now
        self._lock = threading.Lock()
        self._marks: _Marks = ()
        with contextlib.suppress(OSError):  # reading names the file
            self._marks = _marks(files)  # before reading: a change in between is seen by the next call
        self._complaint = ""  # of the last attempt
        self._contents = read_tls(files, now())

    def current(self) -> TlsContents:
        with self._lock:
            try:
                marks = _marks(self._files)
                if marks != self._marks:
                    self._contents = read_tls(self._files, self._now())
                    self._marks, self._complaint = marks, ""
                    _log.info("certificate of %r renewed", self._contents.holder.name)
            except (OSError, UserError) as error:
                if str(error) != self._complaint:
                    self._complaint = str(error)
                    _log.warning("certificates stay as they were: %s", error)
            return self._contents


def _marks(files: TlsFiles) -> _Marks:
    """Returns the marks of the files by which a change is seen. Raises OSError."""
    paths = (files.ca_file, files.cert_file, files.key_file, files.revoked_file)
    return tuple(
        (status.st_ino, status.st_size, status.st_mode, status.st_mtime_ns, status.st_ctime_ns)
        for status in map(os.stat, filter(None, paths))
    )
