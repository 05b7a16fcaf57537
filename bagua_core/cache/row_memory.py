"""Allocates the memory that frames are copied to, and reuses the last batch's when it has no references left.

Fresh memory of a batch's size costs more in page faults than the copy itself. What was cut out of a
buffer, tensor or array, holds a reference to it, so a buffer with no references but ours is free.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

_LARGEST_KEPT_BYTES = 1 << 24
_LEAST_KEPT_BYTES = 1 << 16  # below this, fresh memory is no dearer
_ONLY_OURS = 2  # references: the list's and the one that getrefcount is called with

_lock = threading.Lock()
_kept: list[np.ndarray[Any, np.dtype[np.uint8]]] = []  # at most one; a list, so that no name holds it


def rows(count: int, size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns an array [count, size_bytes], uninitialized, that shares no memory with values in use."""
    total = count * size_bytes
    if not _LEAST_KEPT_BYTES <= total <= _LARGEST_KEPT_BYTES:
        return np.empty((count, size_bytes), dtype=np.uint8)
    with _lock:
        if not (_kept and total <= _kept[0].nbytes <= 4 * total and sys.getrefcount(_kept[0]) == _ONLY_OURS):
            _kept[:] = [np.empty(total, dtype=np.uint8)]
        return _kept[0][:total].reshape(count, size_bytes)
