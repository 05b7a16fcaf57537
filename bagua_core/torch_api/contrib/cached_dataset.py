"""Provides a data set whose samples are computed once, under the original's name and arguments."""

from __future__ import annotations

from typing import Any

from bagua_core.cache import cached_dataset
from bagua_core.cache.cache_plan import DEFAULT_BUFFER_SIZE

__all__ = ["CachedDataset"]


class CachedDataset(cached_dataset.CachedDataset):
    """A bagua_core.CachedDataset, whose other arguments it takes too (kwargs), with Redis as the default backend."""

    def __init__(
        self,
        dataset: Any,
        backend: str = "redis",
        dataset_name: str = "",
        writer_buffer_size: int = DEFAULT_BUFFER_SIZE,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, backend, dataset_name, writer_buffer_size, **kwargs)
