"""Refuses what does not work yet in a job whose replicas are several workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bagua_core.errors import UserError
from bagua_core.model.sharded_modules import workers_averaged
from bagua_core.model.sharded_tensors import is_sharded

ALGORITHMS = ("gradient_allreduce", "bytegrad", "local_sgd", "streaming_diloco")
"""That act on each worker's shard, among the workers with this shard."""


class NotForReplicas(UserError, ValueError):
    """The script asks for something that a job with --replica-size does not support."""


class NoReplicaYet(UserError, RuntimeError):
    """A model was wrapped before this worker had a replica."""


def check_model(described: str, parameters: Iterable[torch.Tensor], size: int) -> None:
    """Refuses an algorithm that does not act on shards, and a model without sharded parameters. described: the model's
    algorithm. size: workers of a replica. Raises NotForReplicas."""
    name = described.split("(")[0].split(",")[0]
    if name not in ALGORITHMS:
        raise NotForReplicas(
            f"algorithm {name} does not act on the shards of a replica of {size} workers; use one of "
            f"{', '.join(ALGORITHMS)}, or leave out --replica-size"
        )
    if not any(is_sharded(p) for p in parameters):
        raise NotForReplicas(
            f"no parameter of the model is sharded, but with --replica-size {size} so many workers hold one copy; "
            "call fully_shard(module, mesh=bagua.shard_mesh()) before it is wrapped, or leave out --replica-size"
        )


def check_divided(modules: Iterable[torch.nn.Module], places: int) -> None:
    """Refuses trained parameters whose gradients are not averaged over the workers with samples of their own, and
    layers that synchronize statistics.

    modules: of models whose replicas divide their samples. places: workers of a replica that get samples of their own.
    Raises NotForReplicas.
    """
    for module in modules:
        averaged = workers_averaged(module)
        for name, layer in module.named_modules():
            # its exchange is among the workers with the same shard, and counts by the samples of whole replicas
            if "SyncBatchNorm" in type(layer).__name__:
                raise NotForReplicas(
                    f"layer {name or type(layer).__name__} is a SyncBatchNorm, which would count the samples of one "
                    "worker of each replica alone; use torch.nn.BatchNorm1d and the like, or give all workers of a "
                    "replica the same samples by ElasticDataLoader(divide_in_replica=False)"
                )
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not is_sharded(parameter):
                raise NotForReplicas(
                    f"parameter {name} is trained and not sharded, so the workers of a replica would change it by "
                    "different samples; shard it by fully_shard, freeze it, or give all workers of a replica the same "
                    "samples by ElasticDataLoader(divide_in_replica=False)"
                )
            if parameter.requires_grad and averaged.get(name) != places:
                over = f"over {averaged[name]} workers" if name in averaged else "over no workers"
                raise NotForReplicas(
                    f"parameter {name} is trained and fully_shard averages its gradients {over}, but {places} workers "
                    "of a replica get samples of their own; workers that share the tensors of a layer (tensor "
                    "parallelism) need the same samples: ElasticDataLoader(divide_in_replica=False), or "
                    "divide_in_replica=mesh of the dimension over which fully_shard was called"
                )


def check_scaled(models: int) -> None:
    """Refuses several models on a batch of which the workers of a replica have different numbers of samples, since a
    gradient that passes through two of them would be scaled twice. Raises NotForReplicas."""
    if models > 1:
        raise NotForReplicas(
            f"{models} models are trained on a batch that the workers of a replica cannot divide evenly; choose a "
            "global_batch_size (and drop_last=True) that divides, or give all workers of a replica the same samples by "
            "ElasticDataLoader(divide_in_replica=False)"
        )


def check_assembled(size: int, is_assembled: bool) -> None:
    """Refuses a model that is wrapped before this worker has a replica. size: as the job was started. Raises
    NoReplicaYet."""
    if size > 1 and not is_assembled:
        raise NoReplicaYet(
            f"a model was wrapped before this worker knew the others of its replica (--replica-size {size}); call "
            "bagua.init_process_group() first, and fully_shard(module, mesh=bagua.shard_mesh()) behind it"
        )
