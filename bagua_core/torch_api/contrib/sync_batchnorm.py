"""Provides batch normalization with the statistics of the global batch, under the original's names.

In a step of a wrapped model it is the core's layer. Outside one, where the core's layer takes this worker's samples
alone, a training forward and its backward exchange their sums by collectives of the script, so all workers must run
them, also under torch.no_grad().
"""

from __future__ import annotations

import torch
from torch import nn

from bagua_core import collectives, sync_batchnorm
from bagua_core.torch_api.script_world import this_script

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(sync_batchnorm.SyncBatchNorm):
    """A bagua_core.SyncBatchNorm that also takes the samples of all workers outside steps."""

    def _peers(self) -> sync_batchnorm.Peers | None:
        within = super()._peers()
        if within is not None or self._engine is not None:
            return within
        script = this_script()
        if script.engine.in_step or not script.world.joined or script.engine.place_of_script()[1] == 1:
            return None
        return _OutsideSteps()

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module) -> nn.Module:
        """Returns `module` with every BatchNorm layer replaced; see convert."""
        return cls.convert(module)


class _OutsideSteps:
    """Exchanges sums among all workers; a collective is run again among those that are left if one is lost."""

    weight = 1.0  # all samples count alike

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        return collectives.allgather(row)

    def total(self, part: torch.Tensor) -> torch.Tensor:
        return collectives.allreduce(part)
