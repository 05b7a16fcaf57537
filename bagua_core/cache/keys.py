"""Digests a key to the 16 bytes under which its value is kept."""

from __future__ import annotations

from hashlib import blake2b
from typing import TypeAlias

Key: TypeAlias = int | str | bytes

DIGEST_BYTES = 16
_INTEGERS = 1 << 64  # digests of integers are this and more, so that none is all zeros


def digest_of(key: Key) -> bytes:
    """Returns DIGEST_BYTES bytes that identify the key. Raises TypeError for other keys than int, str and bytes."""
    kind = type(key)
    if kind is int and 0 <= key < _INTEGERS:  # type: ignore[operator]
        return (key + _INTEGERS).to_bytes(DIGEST_BYTES, "big")  # type: ignore
    if isinstance(key, bytes):
        marked = b"b" + key
    elif isinstance(key, str):
        marked = b"s" + key.encode("utf-8", "surrogatepass")
    elif isinstance(key, int):
        return digest_of(int(key)) if 0 <= key < _INTEGERS and kind is not int else _hashed(b"i%d" % key)
    else:
        raise TypeError(f"the key {key!r} is a {kind.__name__}; use int, str or bytes")
    return _hashed(marked)


def _hashed(marked: bytes) -> bytes:
    return blake2b(marked, digest_size=DIGEST_BYTES, person=b"bagua cache key").digest()
