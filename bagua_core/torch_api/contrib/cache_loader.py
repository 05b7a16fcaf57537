"""Provides a cache of values by key, under the original's name and arguments."""

from __future__ import annotations

from typing import Any

from bagua_core.cache import cache_loader
from bagua_core.torch_api.contrib.utils.store import Store

__all__ = ["CacheLoader"]


class CacheLoader(cache_loader.CacheLoader):
    """A bagua_core.CacheLoader, whose other arguments it takes too (kwargs), with Redis as the default backend."""

    def __init__(
        self, backend: str = "redis", dataset_name: str = "", writer_buffer_size: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(backend, dataset_name, writer_buffer_size, **kwargs)

    @property
    def store(self) -> Store:
        """The same values as a Store, with set, get, mset and mget."""
        return Store(self)
