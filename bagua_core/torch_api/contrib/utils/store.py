"""Provides a dictionary of values in a cache, under the original's name for such a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagua_core.cache.cache_loader import CacheLoader

__all__ = ["Store"]


class Store:
    """Holds the values of one cache by key. A lost or full server is reported once and raises nothing.

    loader: the cache.
    """

    def __init__(self, loader: CacheLoader) -> None:
        self._loader = loader

    def set(self, key: str, value: Any) -> None:
        """Keeps `value`, of a type that CacheLoader takes, under `key`."""
        self.mset({key: value})

    def mset(self, dictionary: Mapping[str, Any]) -> None:
        """Keeps each value of `dictionary` under its key."""
        self._loader.put_many(dictionary)

    def get(self, key: str) -> Any:
        """Returns the value of `key`; None where there is nothing, or its server is lost."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[str]) -> list[Any]:
        """Returns the values of `keys`, in their order; None in the place of one that is not there."""
        return self._loader.peek_many(keys)

    def num_keys(self) -> int:
        """Returns the number of values in the cache. Raises StoreFault."""
        return self._loader.num_keys()

    def clear(self) -> None:
        """Removes all values. Raises StoreFault."""
        self._loader.clear()

    def status(self) -> bool:
        """Tells whether every server answers."""
        return self._loader.is_whole()

    def shutdown(self) -> None:
        """Lets go of the cache; a server that was started here ends with its last user."""
        self._loader.close()
