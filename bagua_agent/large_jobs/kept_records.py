"""The packed parts of the newest large records that a keeper serves, by digest. Thread-safe."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

MOST_KEPT = 2  # the newest, and the one before for late readers


class KeptRecords:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packed: OrderedDict[bytes, bytes] = OrderedDict()

    def keep(self, packed: bytes) -> None:
        with self._lock:
            self._packed[hashlib.sha256(packed).digest()] = packed
            while len(self._packed) > MOST_KEPT:
                self._packed.popitem(last=False)

    def get(self, sha256: bytes) -> bytes | None:
        with self._lock:
            return self._packed.get(sha256)
