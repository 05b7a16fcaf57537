"""Names what replaces the arguments and methods of torch's DistributedDataParallel that Bagua's does not have.

A script that comes from torchrun passes and calls them; the error then says what to write instead.
"""

from __future__ import annotations

from collections.abc import Iterable

_LEAVE_OUT_DEVICE = "the model stays where it is, and the script moves its inputs; leave it out"
_NOTHING_TO_SET = "there is nothing to set; leave it out"
_ARGUMENTS = {
    "device_ids": _LEAVE_OUT_DEVICE,
    "output_device": _LEAVE_OUT_DEVICE,
    "dim": "a batch is never split inside a worker; leave it out",
    "process_group": "all workers of the job train the model; leave it out (bagua.new_group is for collectives)",
    "device_mesh": "all workers of the job train the model; leave it out (bagua.shard_mesh() is for fully_shard)",
    "check_reduction": _NOTHING_TO_SET,
    "gradient_as_bucket_view": _NOTHING_TO_SET,
    "static_graph": _NOTHING_TO_SET,
    "init_sync": "a worker's first step begins with the job's state; leave it out",
    "mixed_precision": "use torch.autocast in the loop",
}
JOIN = "bagua.ElasticDataLoader gives all workers equally many steps, so that none has to join the others; leave it out"
REGISTER_COMM_HOOK = (
    "pass DistributedDataParallel(..., algorithm=bagua.algorithms.Hook(hook, state)) in its place"
)


def unknown_arguments(names: Iterable[str]) -> str:
    """Returns the text of the error for arguments of these names."""
    of_torch = [f"{name} (torch's): {_ARGUMENTS[name]}" for name in names if name in _ARGUMENTS]
    others = [f"got an unexpected keyword argument {name!r}" for name in names if name not in _ARGUMENTS]
    return f"bagua's DistributedDataParallel: {'; '.join([*of_torch, *others])}"
