"""Builds the variables that torchrun gives a worker. Pure: a place in the job in, a dict out.

Owns torchrun's names and their meaning here. The BAGUA_* variables are bagua_contract's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bagua_agent.base.errors import UserError


@dataclass(frozen=True, slots=True)
class TorchrunPlace:
    """A worker's place as torchrun's variables give it.

    With elastic membership these hold only when the worker starts; `bagua_core` knows the present ones.
    use_agent_store: a store listens at master_addr:master_port that no worker hosts.
    """

    local_rank: int
    global_rank: int
    node_rank: int
    local_world_size: int
    world_size: int
    node_count: int
    master_addr: str
    master_port: int
    run_id: str
    restart_count: int = 0
    max_restarts: int = 0
    role: str = "default"
    error_file: str = ""
    use_agent_store: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(f"local rank {self.local_rank} is not below {self.local_world_size}")
        if not 0 <= self.global_rank < self.world_size:
            raise ValueError(f"global rank {self.global_rank} is not below {self.world_size}")


def torchrun_variables(
    place: TorchrunPlace, environ: Mapping[str, str], *, virtual_local_rank: bool = False
) -> dict[str, str]:
    """Returns the variables to add to `environ`, the agent's own environment, for the worker at `place`.

    virtual_local_rank: the worker sees its one GPU as device 0 and LOCAL_RANK is 0. Raises UserError when
    CUDA_VISIBLE_DEVICES lists fewer devices than there are workers.
    """
    variables = {
        "LOCAL_RANK": str(place.local_rank),
        "RANK": str(place.global_rank),
        "GROUP_RANK": str(place.node_rank),
        "ROLE_RANK": str(place.global_rank),  # all workers of a job have one role
        "ROLE_NAME": place.role,
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(place.node_count),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(place.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(place.max_restarts),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(place.use_agent_store),  # torch compares with "True"
        "TORCHELASTIC_ERROR_FILE": place.error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if "OMP_NUM_THREADS" in environ:
        variables["OMP_NUM_THREADS"] = environ["OMP_NUM_THREADS"]
    elif place.local_world_size > 1:
        variables["OMP_NUM_THREADS"] = "1"  # else every worker starts a thread per core
    if virtual_local_rank:
        variables["LOCAL_RANK"] = "0"
        variables["CUDA_VISIBLE_DEVICES"] = _device_of(place.local_rank, environ.get("CUDA_VISIBLE_DEVICES"))
    elif "CUDA_VISIBLE_DEVICES" in environ:
        variables["CUDA_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]
    return variables


def _device_of(local_rank: int, visible: str | None) -> str:
    if visible is None:
        return str(local_rank)
    devices = [device.strip() for device in visible.split(",")]
    if local_rank >= len(devices):
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} has no device for local rank {local_rank};"
            " lower --nproc-per-node or list more devices"
        )
    return devices[local_rank]
