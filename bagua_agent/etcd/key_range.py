"""A contiguous range of keys, as etcd reads and watches it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_agent.base.errors import InternalError


def encode_key(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode_key(key: bytes) -> str:
    """Decodes a key, also one that is not UTF-8: a reader of a prefix must not fail on a stranger's key."""
    return key.decode("utf-8", "surrogateescape")


def end_of_prefix(prefix: str) -> bytes:
    """Returns the first key after all that start with `prefix`."""
    start = bytearray(encode_key(prefix))
    if not start or start[-1] == 0xFF:
        raise InternalError(f"prefix {prefix!r} has no end")
    start[-1] += 1
    return bytes(start)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of keys from `start` up to but without `end`, in etcd's bytes."""

    start: bytes
    end: bytes

    @staticmethod
    def of_prefix(prefix: str) -> KeyRange:
        return KeyRange(encode_key(prefix), end_of_prefix(prefix))

    @staticmethod
    def of_key(key: str) -> KeyRange:
        start = encode_key(key)
        return KeyRange(start, start + b"\0")

    def __contains__(self, key: str) -> bool:
        return self.start <= encode_key(key) < self.end

    def __str__(self) -> str:
        name = self.start.decode("utf-8", "surrogateescape")
        return name if self.end == self.start + b"\0" else f"{name}*"
