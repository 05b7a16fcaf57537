"""Provides the counterpart of torch's DistributedDataParallel, under the name and with the arguments that scripts know.

Whatever can't be done is refused when the model is wrapped: nothing falls back to anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from bagua_core import parallel
from bagua_core.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua_core.torch_api.env import get_default_bucket_size
from bagua_core.torch_api.process_group import BaguaProcessGroup
from bagua_core.torch_api.script_world import Script, this_script
from bagua_core.torch_api.wrapping import Wrapped, check_group, check_ignored, register, reified, release

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Trains `module` on all workers of the job together.

    device_ids: None, or the one device that inputs are moved to.
    output_device: None, or that device.
    dim: 0; a batch is not split inside a worker.
    broadcast_buffers: every training forward begins with rank 0's buffers.
    process_group: None, or a group of all workers.
    bucket_cap_mb: None for BAGUA_DEFAULT_BUCKET_SIZE, which is 25 MiB.
    find_unused_parameters: parameters that took part on no rank keep a .grad of None.
    optimizers: those that step on its parameters; if none are given, those that the script makes.
    algorithm: as in with_bagua.
    check_reduction, gradient_as_bucket_view: there is nothing to switch on, gradients always lie in buckets.

    A module that is wrapped already leaves its former wrapper, as in with_bagua.
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
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Any = None,
        script: Script | None = None,
    ) -> None:
        device = _only_device(device_ids, output_device, dim)
        running = this_script() if script is None else script
        running.world.join()
        check_group(process_group)
        check_ignored(module)
        release(module)
        declared = algorithm or GradientAllReduceAlgorithm()
        own, chosen = reified(declared, module, optimizers)
        super().__init__(
            module,
            optimizers=optimizers or None,  # None: those that the script makes are found at the first forward
            algorithm=chosen,
            bucket_cap_mb=get_default_bucket_size() / (1 << 20) if bucket_cap_mb is None else bucket_cap_mb,
            broadcast_buffers=broadcast_buffers,
            find_unused_parameters=find_unused_parameters,
            engine=running.engine,
        )
        self._device = device
        self._handle = Wrapped(running, self, own, declared)
        register(module, self._handle)
        register(self, self._handle)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Returns what the module returns. In training mode with gradients it begins a step of the job, or continues
        it. Raises RuntimeError if the module was wrapped again since."""
        if self._device is not None:
            inputs, keywords = _moved((inputs, keywords), self._device)
        handle = self._handle
        if handle.is_released:
            raise RuntimeError(
                f"this {type(self.module).__name__} was wrapped again since; call what wrapped it last"
            )
        if not handle.counts(self.training):
            return self.module(*inputs, **keywords)
        handle.forward_begins(inputs)
        return super().forward(*inputs, **keywords)


def _only_device(
    device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None, dim: int
) -> torch.device | None:
    """Returns the device that inputs are moved to; None: they stay where they are. Raises ValueError."""
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
