"""Batch normalization with the statistics of the global batch, under the original's names."""

from __future__ import annotations

from torch import nn

from bagua_core import sync_batchnorm


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """See bagua_core.SyncBatchNorm."""

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        """See convert."""
        return cls.convert(module)
