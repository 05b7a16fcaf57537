"""Do other processes step copies of these parameters? Then what one of them finds out alone must not change its step.

Layouts change no bits in fp32 and fp64, but by rounding in bf16, with torch's fused kernels, compiled, and where an
optimizer sums over all parameters. Replicas that lie otherwise would drift apart.
"""

from __future__ import annotations

import os

import torch

from bagua_contract.environment import variable

# Of torch's launchers, and of a worker of a job: that may be alone now, and not from the next step on.
_WORLD, _OF_A_JOB = "WORLD_SIZE", variable("worker_id")


def is_alone() -> bool:
    if _OF_A_JOB in os.environ or os.environ.get(_WORLD, "1") not in ("", "1"):
        return False
    distributed = torch.distributed
    return not (
        distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    )
