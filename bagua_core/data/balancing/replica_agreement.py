"""How do the replicas of a plain script add their measurements up? By whatever group the script has already.

For samplers outside elastic jobs, where nobody joins; the loader of an elastic job does it inside a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from bagua_core.communication.communicator import ReduceOp
from bagua_core.elastic.step import runtime

Total = Callable[[torch.Tensor], torch.Tensor]


def default_total(num_replicas: int, is_jobs_world: bool) -> Total:
    """Adds a tensor up over all replicas. is_jobs_world: the replicas are the workers of a job of this runtime.

    Raises ValueError where the replicas have no group.
    """
    if num_replicas == 1:
        return lambda tensor: tensor
    if is_jobs_world:
        return lambda tensor: runtime.engine().allreduce(tensor, ReduceOp.SUM)
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == num_replicas:
        return _by_torch
    raise ValueError(
        f"measured=True with {num_replicas} replicas needs a way to add tensors up over them: initialize "
        "torch.distributed with as many processes, or give total="
    )


def _by_torch(tensor: torch.Tensor) -> torch.Tensor:
    # NCCL takes tensors of GPUs only
    device = torch.device("cuda") if dist.get_backend() == "nccl" else tensor.device
    total = tensor.to(device)
    dist.all_reduce(total)
    return total.to(tensor.device)
