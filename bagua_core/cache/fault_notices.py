"""Reports each kind of cache fault once, by one process of the node.

A file with the kind's name in the shared directory records the report; where it cannot be written, each process
reports once. The process that reported a fault also reports its end; after that the fault can be reported again.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

log = logging.getLogger("bagua.cache")


class FaultNotices:
    def __init__(self, directory: Path | None, name: str) -> None:
        """Reports faults of one cache.

        directory: the node's, or None if there is none. name: of the cache, for people.
        """
        self._directory = directory
        self._name = name
        self._known: set[str] = set()
        self._said: dict[str, Path | None] = {}
        self._lock = threading.Lock()

    def say(self, kind: str, text: str) -> None:
        with self._lock:
            if kind in self._known:
                return
            self._known.add(kind)
            mine, marker = self._mark(kind)
            if mine:
                self._said[kind] = marker
        if mine:
            log.warning("%s: %s", self._name, text)
        else:
            log.debug("%s: %s", self._name, text)

    def over(self, kind: str, text: str) -> None:
        """Reports that the fault has passed, if this process reported the fault."""
        with self._lock:
            if kind not in self._known:
                return
            self._known.discard(kind)
            mine = kind in self._said
            marker = self._said.pop(kind, None)
        if mine:
            log.warning("%s: %s", self._name, text)
        if marker is not None:
            marker.unlink(missing_ok=True)

    def _mark(self, kind: str) -> tuple[bool, Path | None]:
        if self._directory is None:
            return True, None
        marker = self._directory / f"said-{re.sub(r'[^A-Za-z0-9]+', '-', kind)}"
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return False, None
        except OSError:
            return True, None  # a full or vanished directory: then every process says it
        return True, marker
