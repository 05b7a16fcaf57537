"""Additions around training, as they arrive. What does not exist yet says so when it is imported."""

from __future__ import annotations

from typing import Any

from bagua_core.torch_api.contrib import sync_batchnorm
from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm
from bagua_core.torch_api.errors import not_offered

__all__ = ["SyncBatchNorm", "sync_batchnorm"]

_MISSING = {
    "CacheLoader": "keep what was computed in a dictionary or on disk",
    "CachedDataset": "keep what was computed in a dictionary or on disk",
    "LoadBalancingDistributedBatchSampler": "use ElasticDataLoader or torch's DistributedSampler",
    "LoadBalancingDistributedSampler": "use ElasticDataLoader or torch's DistributedSampler",
    "fuse_optimizer": "use the optimizer's fused=True or foreach=True",
}


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise not_offered(f"contrib.{name}", _MISSING[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
