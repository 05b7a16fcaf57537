"""Maps keys to the places of their frames: a table of fixed size in a shared file; entries are never moved or removed.

Written by one process at a time, read by all without a lock: an entry's digest is written last, and the reader of
a half-written one finds a frame that is not the key's (`decoding`), which is a miss. The file is allocated whole, so
that neither reading nor writing through the map can meet a full file system.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from bagua_core.cache.errors import StoreFault
from bagua_core.cache.keys import DIGEST_BYTES, KeyDigest

_HEAD = struct.Struct("<8s Q Q Q Q")  # magic, places, limit of the data, end of the data, entries
_DATA_END_AT, _ENTRIES_AT = 24, 32
_MAGIC = b"bagua\0T1"
_HEAD_BYTES = 4096
_PLACE = struct.Struct("<QQ")  # offset and length, behind the digest
_PLACE_BYTES = DIGEST_BYTES + _PLACE.size
_FARTHEST = 128  # places looked at for one key: a table that is this crowded is full
_SPREAD = 0x9E3779B97F4A7C15
_EMPTY = bytes(DIGEST_BYTES)


def table_bytes(places: int) -> int:
    return _HEAD_BYTES + places * _PLACE_BYTES


class EntryTable:
    """Raises OSError and StoreFault where the file is not a table of ours."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(descriptor).st_size
            if size < _HEAD_BYTES:
                raise StoreFault("damaged", f"{path} is no table of entries")
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        magic, self.places, self.data_limit, *_ = _HEAD.unpack_from(self._map)
        if magic != _MAGIC or self.places < 2 or table_bytes(self.places) != size:
            self._map.close()
            raise StoreFault("damaged", f"{path} is a table of another version")

    @staticmethod
    def create(path: Path, places: int, data_limit: int) -> None:
        """Raises OSError, also where there is no room."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, table_bytes(places))
            os.pwrite(descriptor, _HEAD.pack(_MAGIC, places, data_limit, 0, 0), 0)
        finally:
            os.close(descriptor)

    # -- by all

    def find(self, key: KeyDigest) -> tuple[int, int] | None:
        """Offset and length of the frame."""
        at = self._place_of(key)
        if at is None or self._map[at : at + DIGEST_BYTES] != key.raw:
            return None
        offset, length = _PLACE.unpack_from(self._map, at + DIGEST_BYTES)
        if offset + length > self.data_limit:
            return None
        return offset, length

    @property
    def data_end(self) -> int:
        return self._number(_DATA_END_AT)

    @property
    def entries(self) -> int:
        return self._number(_ENTRIES_AT)

    # -- only with the writers' lock held

    def can_take(self, key: KeyDigest) -> bool:
        return self._place_of(key) is not None

    def reserve(self, data_end: int) -> None:
        """Nothing before `data_end` is given out again, whatever becomes of the writer."""
        struct.pack_into("<Q", self._map, _DATA_END_AT, data_end)

    def publish(self, key: KeyDigest, offset: int, length: int) -> bool:
        """The frame is there; a second one under the same key takes the first one's place. Returns False if other keys,
        of the same batch perhaps, have taken every place."""
        at = self._place_of(key)
        if at is None:
            return False
        known = self._map[at : at + DIGEST_BYTES] == key.raw
        _PLACE.pack_into(self._map, at + DIGEST_BYTES, offset, length)
        self._map[at : at + DIGEST_BYTES] = key.raw
        if not known:
            struct.pack_into("<Q", self._map, _ENTRIES_AT, self.entries + 1)
        return True

    def clear(self) -> None:
        """Forget the entries; readers may still hold the data of theirs, so that is not given out again."""
        for begin in range(_HEAD_BYTES, len(self._map), 1 << 20):
            end = min(begin + (1 << 20), len(self._map))
            self._map[begin:end] = bytes(end - begin)
        struct.pack_into("<Q", self._map, _ENTRIES_AT, 0)

    def _place_of(self, key: KeyDigest) -> int | None:
        """Where the key is, or could be put; None if everything near its home is taken."""
        shared, raw, places = self._map, key.raw, self.places
        # strides differ, or a run of successive numbers would be an obstacle to all that come to be among them
        stride = 1 + (key.home * _SPREAD >> 16) % (places - 1)
        place = key.home % places
        for _ in range(_FARTHEST):
            at: int = _HEAD_BYTES + place * _PLACE_BYTES
            found = shared[at : at + DIGEST_BYTES]
            if found in (raw, _EMPTY):
                return at
            place = (place + stride) % places
        return None

    def _number(self, at: int) -> int:
        number: int = struct.unpack_from("<Q", self._map, at)[0]
        return number
