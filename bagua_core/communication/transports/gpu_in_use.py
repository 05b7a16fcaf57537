"""Finds the GPU that this worker's script uses, if any: the one that its models are on.

Asks torch only for what is there already: a process that has not used CUDA gets no context by it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def gpus_of(parameters: Iterable[torch.Tensor]) -> tuple[torch.device, ...]:
    """Returns the GPUs that this worker's script uses. parameters: of all models so far. If there are none, the script
    may yet use the current GPU, if it has used any at all."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()  # so nothing can be on one
    devices = {p.device for p in parameters}
    if not devices:
        return (torch.device("cuda", torch.cuda.current_device()),)
    return tuple(sorted((d for d in devices if d.type == "cuda"), key=str))
