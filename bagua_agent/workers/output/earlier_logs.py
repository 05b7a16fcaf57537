"""Removes the logs of workers that were replaced, once a slot's replaced workers have written too much.

A worker's own output is bounded by `log_file.py`; a script whose workers end again and again would fill the disk with
directories of ended workers. Knows those of this agent alone: other runs of the job keep theirs.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

MOST_EARLIER = 100  # of one slot
STREAMS = 2


def too_many(sizes_bytes: Sequence[int], most_bytes: int) -> int:
    """Returns how many of a slot's earlier workers, from the oldest on, lose their logs; pure. sizes_bytes: of these
    workers' logs, oldest first.

    The last one always stays: it says why its worker was replaced.
    """
    gone = max(0, len(sizes_bytes) - MOST_EARLIER)
    left_bytes = sum(sizes_bytes[gone:])
    while left_bytes > most_bytes and gone < len(sizes_bytes) - 1:
        left_bytes -= sizes_bytes[gone]
        gone += 1
    return gone


class EarlierLogs:
    """Removes the logs of a slot's earlier workers. Used by one thread at a time. most_log_bytes: of one stream of a
    worker; 0: nothing is removed."""

    def __init__(self, most_log_bytes: int) -> None:
        self._most_bytes = STREAMS * most_log_bytes
        self._by_slot: dict[int, list[Path]] = {}

    def begin(self, slot: int, directory: Path) -> None:
        """Records that a worker has this slot from now on, and writes to `directory`. All workers of the slot before it
        have ended."""
        if not self._most_bytes:
            return
        earlier = self._by_slot.setdefault(slot, [])
        for path in earlier[: too_many([_size_bytes(path) for path in earlier], self._most_bytes)]:
            earlier.remove(path)
            _remove(path)
        earlier.append(directory)


def _size_bytes(directory: Path) -> int:
    try:
        with os.scandir(directory) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:  # removed by hand
        return 0


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s is not needed any more and can't be removed: %s; remove it by hand", directory, error)
    else:
        log.info("removed %s: newer workers of its slot have filled what its logs may take", directory)
