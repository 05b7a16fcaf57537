"""The exceptions of the cache."""

from __future__ import annotations


class CacheOptionError(ValueError):
    """The script asked for a cache that cannot be; said when the cache is made, before training."""


class MissingPartError(RuntimeError):
    """A backend needs something that is not installed; said when the cache is made."""


class NotCacheableError(TypeError):
    """A value that does not become bytes. It is used, and loaded again the next time."""


class UnreadableError(ValueError):
    """Bytes in the cache that are not a value of ours: damaged, cut, of another format or another key."""


class StoreFault(Exception):
    """The store does not work now. `kind` tells faults apart that are worth a message each."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
