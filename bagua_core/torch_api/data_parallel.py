"""The counterpart of torch's DistributedDataParallel, under the name and with the arguments that scripts know.

Whatever can't be done is refused when the model is wrapped: nothing falls back to anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from bagua_core import parallel
from bagua_core.communication.buckets import DEFAULT_BUCKET_CAP_MB
from bagua_core.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_core.torch_api.communication import BaguaProcessGroup
from bagua_core.torch_api.script_world import Script, this_script
from bagua_core.torch_api.wrapping import Wrapped, check_group, check_new, register, reified


class DistributedDataParallel(parallel.DistributedDataParallel):
    """`module`, trained by all workers of the job together.

    device_ids: None, or the one device that inputs are moved to. optimizers: those that step on its parameters; if
    none are given, those that the script makes. algorithm: as in with_bagua. check_reduction, gradient_as_bucket_view:
    there is nothing to switch on, gradients always lie in buckets.
    Raises ValueError, SparseGradientError, ModelsDifferError.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        process_group: BaguaProcessGroup | None = None,
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Any = None,
        script: Script | None = None,
    ) -> None:
        device = _only_device(device_ids, output_device, dim)
        check_group(process_group)
        check_new(module)
        running = this_script() if script is None else script
        running.world.join()
        own, chosen = reified(algorithm or GradientAllReduceAlgorithm(), module, optimizers)
        super().__init__(
            module,
            optimizers=optimizers or None,  # None: those that the script makes are found at the first forward
            algorithm=chosen,
            bucket_cap_mb=bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            engine=running.engine,
        )
        self._device = device
        self._handle = Wrapped(running, self, own)
        register(module, self._handle)
        register(self, self._handle)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        if self._device is not None:
            inputs, keywords = _moved((inputs, keywords), self._device)
        handle = self._handle
        if not handle.counts(self.training):
            return self.module(*inputs, **keywords)
        handle.forward_begins(inputs)
        return super().forward(*inputs, **keywords)


def _only_device(
    device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None, dim: int
) -> torch.device | None:
    """Where inputs go; None: they stay. Raises ValueError."""
    if dim != 0:
        raise ValueError(f"dim={dim}: a batch is never split inside a worker; leave it out")
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids={list(device_ids)}: a worker has one device; start a worker for each")
    device = None if not device_ids else torch.device(device_ids[0])
    if output_device is not None and (device is None or torch.device(output_device) != device):
        raise ValueError(f"output_device={output_device!r}: outputs stay where the model is; leave it out")
    return device


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map(lambda v: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v, values)
