"""Bagua's communication core: what a training script imports.

    import bagua_core as bagua
    bagua.init_process_group()
    model = bagua.DistributedDataParallel(net, optimizers=[optimizer])
    loader = bagua.ElasticDataLoader(dataset, global_batch_size=64, seed=0)
    for epoch in loader.epochs(10):
        for x, y in loader:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

The same script runs under plain `python` (a world of one) and under `bagua-launch`.
"""

from __future__ import annotations

import warnings as _warnings
from typing import TYPE_CHECKING

from bagua_contract.distribution import original_beside as _original_beside
from bagua_core import algorithms
from bagua_core.across_replicas import ReplicaGroup as _ReplicaGroup
from bagua_core.cache.cache_loader import CacheLoader
from bagua_core.cache.cached_dataset import CachedDataset
from bagua_core.collectives import (
    Group,
    allgather,
    allgather_inplace,
    allgather_rows,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    broadcast_inplace,
    broadcast_object,
    gather,
    gather_inplace,
    new_group,
    recv,
    recv_inplace,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua_core.communication.communicator import ReduceOp
from bagua_core.communication.step_interface import Stateful
from bagua_core.data.balancing.balance import Balance
from bagua_core.data.elastic_loader import ElasticDataLoader
from bagua_core.elastic.replica import torch_group as _torch_group
from bagua_core.elastic.script_collectives.default_group import forbid_default_group as _forbid_default_group
from bagua_core.elastic.script_collectives.members_changed import JobClosing, MembersChanged, PeerLostError
from bagua_core.elastic.script_collectives.outside_collectives import SourceHasNoState
from bagua_core.elastic.step import runtime as _runtime
from bagua_core.elastic.waiting.operations import MismatchedCollective
from bagua_core.function_launch import launch
from bagua_core.fused_optimizer import fuse_optimizer
from bagua_core.loss_scale import scale_loss
from bagua_core.parallel import DistributedDataParallel
from bagua_core.sync_batchnorm import SyncBatchNorm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__version__ = "0.1.0"

if _beside := _original_beside():
    _warnings.warn(_beside, RuntimeWarning, stacklevel=2)

__all__ = [
    "Balance",
    "CacheLoader",
    "CachedDataset",
    "DistributedDataParallel",
    "ElasticDataLoader",
    "Group",
    "JobClosing",
    "MembersChanged",
    "MismatchedCollective",
    "PeerLostError",
    "ReduceOp",
    "SourceHasNoState",
    "SyncBatchNorm",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allgather_rows",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "broadcast_inplace",
    "broadcast_object",
    "fuse_optimizer",
    "gather",
    "gather_inplace",
    "generation",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_launched",
    "launch",
    "new_group",
    "next_step",
    "recv",
    "recv_inplace",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "register_state",
    "replica_count",
    "replica_group",
    "replica_rank",
    "replica_size",
    "report",
    "scale_loss",
    "scatter",
    "scatter_inplace",
    "send",
    "shard_mesh",
    "shard_rank",
    "shutdown",
    "virtual_shards",
]


def init_process_group(seed: int | None = None) -> None:
    """Joins the job, so that ranks and collectives are real from here on; without an agent it is a world of one.

    The job's first workers wait here for each other. A worker that comes while the job trains has the rank after the
    last one until its first step, and is answered what the first workers' collectives before the loop returned; see
    docs/collectives.md.

    seed: what random numbers drawn in steps follow from, besides step and rank. By default the seed that the script
    gave to torch.manual_seed before its first step. ElasticDataLoader's own seed goes before both.
    Raises SessionError if the agent does not answer, WorkerEnvironmentError for a broken environment.
    """
    engine = _runtime.engine()
    if seed is not None:
        engine.seed(seed)
    engine.join_before_loop()


def shutdown() -> None:
    """Ends this process's training: commits the step under way, stops the loader's processes, releases the models.

    Under plain `python` the next training begins at step 0, with its own models, optimizers, loader and registered
    states. In a job every worker must call it; it returns once all have committed the last step, and what uses the job
    afterwards raises TrainingOver. Calling it again, or without a training, does nothing.
    Raises ForkedWorkerError in a child process.
    """
    _runtime.end_training()


def is_launched() -> bool:
    """Tells whether an agent started this process; False under plain `python`."""
    return _runtime.is_launched()


def get_rank() -> int:
    """Returns the global rank in the generation in force. Joins the job if init_process_group() was not called; see
    there.

    Between steps joiners, which cannot take part in a collective there yet, do not count. A step of a loop of
    next_step() begins with its first forward, so a script that divides data asks once, before that.
    """
    return _runtime.engine().asked_place()[0]


def get_world_size() -> int:
    """Returns the number of workers in the generation in force. See get_rank."""
    return _runtime.engine().asked_size()


def get_local_rank() -> int:
    """Returns the index of this worker's device on its node; it is fixed for the life of the process.

    It is the worker's slot, or 0 under --virtual-local-rank, where the worker sees one GPU only.
    """
    return _runtime.engine().local_rank


def shard_mesh() -> DeviceMesh:
    """Returns the workers of this worker's replica, as the mesh that `fully_shard(module, mesh=bagua.shard_mesh())`
    takes.

    One dimension, "shard", of replica_size() workers. Inside a replica torch's default process group is the replica's,
    so torch.distributed.get_rank() is shard_rank(). Joins the job as init_process_group() does, and waits there for the
    other workers of the replica. Raises MixedModesError if the script has made a default process group by itself.
    """
    _runtime.engine().join_before_loop()
    _forbid_default_group()
    return _torch_group.mesh()


def replica_size() -> int:
    """Returns the number of workers that together hold one copy of the model: --replica-size; 1 without it."""
    return _runtime.engine().shard_place()[1]


def shard_rank() -> int:
    """Returns this worker's place in its replica, from 0; it is fixed for its life. Joins the job: see get_rank."""
    return _runtime.engine().shard_place()[0]


def replica_rank() -> int:
    """Returns the place of this worker's replica among the replicas of the generation in force. See get_rank, which is
    replica_rank() * replica_size() + shard_rank()."""
    return _runtime.engine().replica_place()[0]


def replica_count() -> int:
    """Returns the number of replicas in the generation in force: what a learning rate scales with, as get_world_size()
    in a job without --replica-size. See get_rank."""
    return _runtime.engine().replica_place()[1]


def replica_group() -> ProcessGroup:
    """Returns the workers that hold this worker's shard, one of each replica in force, as a process group of torch.

        torch.distributed.all_reduce(norms, group=bagua.replica_group())

    Its rank and size are replica_rank() and replica_count(), and follow the generation. Its collectives are those of
    the script (docs/collectives.md): every worker of the job makes the same calls. In a step they are part of the step;
    outside steps they are repeated if a worker is lost, or raise PeerLostError, MembersChanged or JobClosing. They are
    complete when they return. Without --replica-size they are among all workers. docs/sharded-models.md lists the calls
    of torch that it has. Joins the job as init_process_group() does, and makes torch's default group if there is none,
    as shard_mesh() does. Raises MixedModesError if the script has made a default process group by itself.
    """
    _runtime.engine().join_before_loop()
    _forbid_default_group()
    _torch_group.ensure()
    return _ReplicaGroup.of_this_process()


def generation() -> int:
    """Returns the number of the generation in force; 0 in a world of one."""
    return _runtime.engine().generation_number


def virtual_shards() -> int | None:
    """Returns the number of virtual shards of a global batch in a deterministic job, which is fixed for its life; None
    in any other. For rules that would scale by the number of workers."""
    return _runtime.engine().virtual_shards or None


def next_step() -> int:
    """Makes the step boundary of loops that do not use ElasticDataLoader: call it at the top of each iteration.

    Commits or rolls back the step before, follows changes of membership, and returns the number of steps
    committed so far; after a failed step that is the same number again. Stop when it is enough:

        while bagua.next_step() < 1000:
            train()
    """
    return _runtime.engine().next_step()


def register_state(name: str, stateful: Stateful) -> None:
    """Makes `stateful` (with state_dict and load_state_dict: a scheduler, a scaler) part of the job's state.

    Failed steps restore it, workers that join receive it. Raises TypeError, ValueError (name taken).
    """
    _runtime.engine().register_state(name, stateful)


def report(**metrics: float) -> None:
    """Shows numbers such as `loss=0.3` beside the job's progress on the terminal.

    metrics: numbers by name; the newest value of each is shown. Raises ValueError or TypeError for what is no number.
    """
    _runtime.engine().metrics.update({name: float(value) for name, value in metrics.items()})
