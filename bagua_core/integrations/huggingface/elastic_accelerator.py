"""Provides ElasticAccelerator: accelerate's Accelerator as a worker of an elastic job.

accelerate itself sees a single process, so it makes no process group and wraps nothing. The model, the train loader,
the ranks and the collectives are bagua_core's. docs/design/huggingface.md says why.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, PartialState
from accelerate.utils import is_torch_tensor, recursively_apply, send_to_device
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.algorithms import Algorithm
from bagua_core.communication.step_interface import MicroBatch
from bagua_core.elastic.step import runtime
from bagua_core.integrations.evaluation_batches import Placed, shared
from bagua_core.integrations.huggingface.refusals import METHODS, check_arguments, check_precision, refused
from bagua_core.integrations.huggingface.train_loader import TrainLoader, train_loader
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, algorithm_of_steps
from bagua_core.integrations.worker_values import gather_objects, gather_unequal, mean, total

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class ElasticAccelerator(Accelerator):
    """An Accelerator whose process is a worker of an elastic job; see docs/huggingface.md.

    Use `accelerator = ElasticAccelerator("bytegrad")`, and `for epoch in loader.epochs(10)`.

    algorithm: a name, or an object of bagua_core.algorithms.
    global_batch_size: samples of one step over all workers; by default the train loader's batch size.
    seed: the order of the samples follows from it and the epoch.
    accelerator_arguments: Accelerator's own.
    Raises UnsupportedInElasticJob.
    """

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        **accelerator_arguments: Any,
    ) -> None:
        check_arguments(accelerator_arguments, os.environ)
        self._algorithm = algorithm_of_steps(algorithm)
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._train_loader: TrainLoader | None = None
        self._is_preparing = False
        self._decided_as_joiner = False
        self._registered: list[Any] = []  # schedulers; accelerate's own list is emptied by free_memory()
        self._evaluated_in: MicroBatch | None = None  # where in a step an evaluation was begun last
        bagua.init_process_group()
        if torch.cuda.is_available() and not accelerator_arguments.get("cpu"):
            torch.cuda.set_device(bagua.get_local_rank())
        with single_process():
            super().__init__(**accelerator_arguments)
        if self.distributed_type != DistributedType.NO:
            raise UnsupportedInElasticJob(
                f"accelerate was initialized as {self.distributed_type} before: make the ElasticAccelerator first"
            )
        check_precision(self.mixed_precision)
        self._follow_ranks()

    # -- place

    @property
    def num_processes(self) -> int:
        return bagua.get_world_size()

    @property
    def process_index(self) -> int:
        return bagua.get_rank()

    @property
    def local_process_index(self) -> int:
        return bagua.get_local_rank()

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    def _follow_ranks(self) -> None:
        """Puts the ranks into accelerate's shared state, by which its loggers, print() and save() decide."""
        engine = runtime.engine()
        # Between steps a joiner has the rank behind the others; what is kept here counts in its first step too.
        rank = engine.plan.global_rank if engine.joining else self.process_index
        for state in (PartialState(), AcceleratorState()):
            state.process_index = rank
            state.local_process_index = self.local_process_index

    # -- what is prepared

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepares the objects, as Accelerator.prepare does, and returns them in order. The first DataLoader of all
        calls is the train loader, the others are divided for an evaluation. A model comes with the optimizers of its
        parameters in one call.

        Raises UnsupportedInElasticJob.
        """
        self._is_preparing = True
        try:
            found = super().prepare(*objects, device_placement=device_placement)
        finally:
            self._is_preparing = False
        prepared = found if len(objects) > 1 else (found,)
        optimizers = [o.optimizer for o in prepared if o in self._optimizers]
        prepared = tuple(
            self._wrapped(thing, optimizers) if isinstance(thing, torch.nn.Module) else thing
            for thing in prepared
        )
        for scheduler in self._schedulers:
            if not any(scheduler is known for known in self._registered):
                name = f"huggingface.scheduler{len(self._registered)}"
                bagua.register_state(name, scheduler.scheduler)
                self._registered.append(scheduler)
        return prepared if len(objects) > 1 else prepared[0]

    def prepare_model(self, model: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if not self._is_preparing:
            raise UnsupportedInElasticJob(
                "ElasticAccelerator.prepare_model() would leave the model without its optimizer: use prepare(model, "
                "optimizer)"
            )
        return super().prepare_model(model, *arguments, **keywords)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        places = self.device_placement if device_placement is None else device_placement
        return self._loader(data_loader, self._placed if places else lambda batch: batch)

    def unwrap_model(self, model: Any, *arguments: Any, **keywords: Any) -> Any:
        inner = model.module if isinstance(model, bagua.DistributedDataParallel) else model
        return super().unwrap_model(inner, *arguments, **keywords)

    def _loader(self, loader: DataLoader[Any], placed: Placed) -> object:
        if self._train_loader is not None:
            return shared(loader, self._evaluation_begins, placed)
        return self._as_train_loader(loader, placed)

    def _evaluation_begins(self) -> tuple[int, int]:
        engine = runtime.engine()
        self._evaluated_in = engine.micro_batch if engine.in_step else None
        return self.process_index, self.num_processes

    @property
    def _has_fillers_values(self) -> bool:
        """Whether the script computes values of fillers here. Behind an evaluation in a loop body they are its own."""
        engine = runtime.engine()
        return engine.has_fillers and engine.micro_batch is not self._evaluated_in

    def _as_train_loader(
        self, loader: DataLoader[Any], placed: Placed, max_local_batch_size: int | None = None
    ) -> TrainLoader:
        self._train_loader = train_loader(
            loader,
            self._global_batch_size,
            self._seed,
            placed,
            self._follow_ranks,
            max_local_batch_size=max_local_batch_size,
        )
        return self._train_loader

    def _placed(self, batch: Any) -> Any:
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)

    def _wrapped(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> torch.nn.Module:
        trained = {id(p) for p in model.parameters() if p.requires_grad}
        if not trained:
            return model  # of an evaluation, or a teacher
        own = [o for o in optimizers if any(id(p) in trained for g in o.param_groups for p in g["params"])]
        if not own:
            raise UnsupportedInElasticJob(
                f"ElasticAccelerator.prepare() got a {type(model).__name__} without its optimizer: pass both in one "
                "call"
            )
        return bagua.DistributedDataParallel(model, own, self._algorithm, **self._wrapping())

    def _wrapping(self) -> dict[str, Any]:
        """Returns how models are wrapped, as arguments of DistributedDataParallel."""
        return {}

    # -- steps

    def _do_sync(self) -> None:
        """Decides whether the optimizer steps on this batch, from the job's place and not from a counter of this
        process: a joiner and a repeated step decide as the others do."""
        loader, settings = self._train_loader, self.gradient_state
        if loader is None:
            raise UnsupportedInElasticJob("ElasticAccelerator.accumulate() needs a train loader: prepare it")
        if settings.sync_with_dataloader:
            done, ends_epoch = loader.position()["batch"], loader.is_at_last_batch
        else:  # a group may go on in the next epoch
            done, ends_epoch = loader.step, False
        self.step = done + 1
        self._decided_as_joiner = runtime.engine().joining
        settings._set_sync_gradients(ends_epoch or self.step % settings.num_steps == 0)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        super().backward(loss, **keywords)
        if self._decided_as_joiner:
            self._do_sync()  # it has the job's state only now, of which the end of a stream's epoch is a part

    # -- collectives

    def gather(self, tensor: Any) -> Any:
        """Returns every worker's tensors, joined in their first dimension, whose sizes may differ. Those computed from
        fillers are left out.

        Raises UnsupportedInElasticJob where other sizes differ, and for anything but tensors.
        """
        found = _applied("gather", partial(_gathered_rows, is_filler=self._has_fillers_values), tensor)
        self._follow_ranks()  # a loss between steps is met in a collective
        return found

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gathers tensors as `gather` does, and lists of objects to the list of all workers' objects, by rank.
        Evaluation loaders give every sample once, so there is nothing to cut off.

        use_gather_object: gather tensors in a list as objects too, in whatever shapes.
        Raises UnsupportedInElasticJob for objects that are in no list, CannotTravel (bagua.broadcast_object says what
        an object may be).
        """
        leaves = list(_leaves(input_data))
        has_objects = use_gather_object or not all(map(is_torch_tensor, leaves))
        # empty lists are those of a worker without a share in the batch, and the others wait for it
        if not has_objects and (leaves or not isinstance(input_data, (list, tuple))):
            return self.gather(input_data)
        if not isinstance(input_data, (list, tuple)):
            raise UnsupportedInElasticJob(
                "ElasticAccelerator.gather_for_metrics() gathers objects as a list, not as "
                f"{type(input_data).__name__}: make one call for each value"
            )
        found = gather_objects(input_data, is_filler=self._has_fillers_values)
        self._follow_ranks()
        return found

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Pads every worker's tensors to one size in `dim`: the largest."""
        found = _applied(
            "pad_across_processes", lambda t: _padded_to_largest(t, dim, pad_index, pad_first), tensor
        )
        self._follow_ranks()
        return found

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduces the workers' tensors to their sum or mean, of workers that have the job's state and samples of the
        step. scale: used on TPUs only, as in accelerate."""
        if reduction not in ("sum", "mean"):
            raise UnsupportedInElasticJob(
                f"ElasticAccelerator.reduce(): reduction={reduction!r} is no sum or mean"
            )
        combine = partial(mean if reduction == "mean" else total, is_filler=self._has_fillers_values)
        found = _applied("reduce", lambda t: combine(t), tensor)
        self._follow_ranks()
        return found

    def wait_for_everyone(self) -> None:
        bagua.barrier()
        self._follow_ranks()


for _name in METHODS:
    setattr(ElasticAccelerator, _name, refused(_name))


def _applied(method: str, function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """Returns `data` with the function's result in the place of each tensor. Raises UnsupportedInElasticJob."""
    for leaf in _leaves(data):
        if not is_torch_tensor(leaf):  # to return it as it is would give each worker its own
            raise UnsupportedInElasticJob(
                f"ElasticAccelerator.{method}() takes tensors, in lists, tuples and dictionaries, not "
                f"{type(leaf).__name__}: make a tensor of it, or gather a list of objects by gather_for_metrics()"
            )
    return recursively_apply(function, data)


def _leaves(data: Any) -> Iterator[Any]:
    """Yields the objects that recursively_apply finds in `data`."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _leaves(item)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    else:
        yield data


def _gathered_rows(tensor: torch.Tensor, is_filler: bool) -> torch.Tensor:
    """Returns every worker's rows. All workers raise the same error, for it follows from the gathered shapes."""
    parts = gather_unequal(tensor.reshape(1) if tensor.dim() == 0 else tensor, is_filler=is_filler)
    if len({part.shape[1:] for part in parts}) > 1:
        shapes = ", ".join(str(list(part.shape)) for part in parts)
        raise UnsupportedInElasticJob(
            f"ElasticAccelerator.gather() joins tensors in their first dimension, and the workers' have the shapes "
            f"{shapes}; make the other sizes equal first, by accelerator.pad_across_processes(tensor, dim=1)"
        )
    return torch.cat(parts)


def _padded_to_largest(tensor: torch.Tensor, dim: int, pad_index: int, pad_first: bool) -> torch.Tensor:
    if not -tensor.dim() <= dim < tensor.dim():
        return tensor
    size = tensor.shape[dim]
    sizes = torch.tensor([size], dtype=torch.int64, device="cpu")
    largest = max(size, int(bagua.allreduce(sizes, bagua.ReduceOp.MAX)))  # a joiner's own size is not in it
    shape = list(tensor.shape)
    shape[dim] = largest
    padded = tensor.new_full(shape, pad_index)
    padded.narrow(dim, largest - size if pad_first else 0, size).copy_(tensor)
    return padded


@contextmanager
def single_process() -> Iterator[None]:
    """Hides the launcher's ranks: accelerate would make torch's default process group of them."""
    kept = {name: os.environ.pop(name) for name in _PLACE if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
