"""Runs scripts that were written for the original Bagua after a change of their import, on CPU as well:

    import bagua_core.torch_api as bagua
    bagua.init_process_group()
    model = model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())

Importing this package gives every torch module `with_bagua` and the attributes that describe its wrapping
(module_attributes.py), and takes note of optimizers as they are made; init_process_group() replaces functions of
torch.distributed (torch_default_group.py). What works how, and what does not: docs/original-scripts.md.
"""

from __future__ import annotations

import torch
from torch import nn

from bagua_core import ElasticDataLoader, register_state, report
from bagua_core.communication.communicator import ReduceOp
from bagua_core.torch_api import (
    algorithms,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    env,
    module_attributes,
    utils,
)
from bagua_core.torch_api.absent_names import offer_alternatives
from bagua_core.torch_api.communication import (
    BaguaProcessGroup,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_object,
    gather,
    gather_inplace,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    init_process_group,
    new_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua_core.torch_api.distributed import BaguaModule
from bagua_core.torch_api.model_parallel import moe
from bagua_core.torch_api.optimizers_made import take_note
from bagua_core.torch_api.script_world import this_script
from bagua_core.torch_api.wrapping import with_bagua

__all__ = [
    "BaguaModule",
    "BaguaProcessGroup",
    "ElasticDataLoader",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_object",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "env",
    "gather",
    "gather_inplace",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "moe",
    "new_group",
    "next_step",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "register_state",
    "report",
    "scatter",
    "scatter_inplace",
    "send",
    "utils",
    "version",
]


version: str = torch.__version__
"""As in the original: torch's, not this package's, which is bagua_core.__version__ or `bagua-launch --version`."""


def next_step() -> int:
    """Marks a step of a loop whose steps can't be found from its forwards and optimizers, such as one that trains a
    model in eval mode. Call it at the top of each iteration, in all of them. See bagua_core.next_step."""
    return this_script().steps.next_step()


nn.Module.with_bagua = with_bagua  # type: ignore[attr-defined]
module_attributes.install()
take_note()
offer_alternatives()
