"""The exceptions of the cache."""

from __future__ import annotations

from bagua_core.errors import InfrastructureLost, PeerViolation, UserError


class CacheOptionError(UserError, ValueError):
    """The script requests a cache that is impossible; raised when the cache is created, before training."""


class MissingPartError(UserError, RuntimeError):
    """A backend needs something that is not installed; raised when the cache is created."""


class NotCacheableError(UserError, TypeError):
    """A value cannot be encoded as bytes. It is used, and loaded again the next time."""


class UnreadableError(PeerViolation, ValueError):
    """Bytes in the cache are not a value of ours: damaged, cut, of another format or another key."""


class StoreFault(InfrastructureLost):
    """The store does not work now. `kind` tells faults apart that are worth a message each."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
