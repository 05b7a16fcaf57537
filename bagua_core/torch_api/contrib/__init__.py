"""Provides the original's additions around training."""

from __future__ import annotations

from bagua_core.torch_api.contrib import (
    cache_loader,
    cached_dataset,
    fused_optimizer,
    load_balancing_data_loader,
    sync_batchnorm,
)
from bagua_core.torch_api.contrib.cache_loader import CacheLoader
from bagua_core.torch_api.contrib.cached_dataset import CachedDataset
from bagua_core.torch_api.contrib.fused_optimizer import fuse_optimizer
from bagua_core.torch_api.contrib.load_balancing_data_loader import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from bagua_core.torch_api.contrib.sync_batchnorm import SyncBatchNorm

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "cache_loader",
    "cached_dataset",
    "fuse_optimizer",
    "fused_optimizer",
    "load_balancing_data_loader",
    "sync_batchnorm",
]
