"""Provides BaguaStrategy: Lightning's Trainer as a worker of an elastic job.

Owns what the trainer asks of a strategy: devices, the wrapped model, collectives, loaders. When a step begins and ends
is trainer_steps.py's, what belongs to its state trainer_state.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

import bagua_core as bagua
from bagua_core.algorithms import Algorithm, find_algorithm
from bagua_core.communication.reduction.buckets import DEFAULT_BUCKET_CAP_MB
from bagua_core.elastic.step import runtime
from bagua_core.elastic.step.step_states import Phase
from bagua_core.integrations.evaluation_batches import shared
from bagua_core.integrations.lightning import collectives
from bagua_core.integrations.lightning.environment import BaguaEnvironment
from bagua_core.integrations.lightning.launcher import BaguaLauncher
from bagua_core.integrations.lightning.refusals import check_divided_validation, check_trainer
from bagua_core.integrations.lightning.train_batches import TrainBatches, elastic
from bagua_core.integrations.lightning.trainer_state import TrainerState
from bagua_core.integrations.lightning.trainer_steps import TrainerSteps
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob, algorithm_of_steps


class BaguaStrategy(ParallelStrategy):
    """A strategy that makes Lightning's Trainer a worker of an elastic job; see docs/lightning.md.

    Use `Trainer(strategy=BaguaStrategy(algorithm="bytegrad"))`.

    algorithm: a name, with `algorithm_arguments` for its class, or an object of bagua_core.algorithms.
    global_batch_size: samples of one step over all workers. By default the train loader's batch size times the
    Trainer's `devices` and `num_nodes`, for the whole job, however many workers there are.
    The others as for bagua_core.DistributedDataParallel and Lightning's own strategies.
    """

    strategy_name = "bagua"
    model: Any

    def __init__(
        self,
        algorithm: str | Algorithm = "gradient_allreduce",
        *,
        global_batch_size: int | None = None,
        bucket_cap_mb: float = DEFAULT_BUCKET_CAP_MB,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **algorithm_arguments: Any,
    ) -> None:
        self._environment = BaguaEnvironment()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self._environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        if algorithm_arguments:
            algorithm = type(find_algorithm(algorithm))(**algorithm_arguments)
        self._algorithm = algorithm_of_steps(algorithm)
        self._global_batch_size = global_batch_size
        self._wrapping: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
        }
        self.num_nodes = 1  # set by the trainer
        self._batches: TrainBatches | None = None
        self._steps: TrainerSteps | None = None
        self._divides_evaluations: bool | None = None  # None: the trainer has not said so yet
        self._has_trained = False  # what follows is each worker's own

    # -- place

    @property
    def is_distributed(self) -> bool:
        """Whether the trainer reduces what is logged with sync_dist=True: always."""
        return True

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices
        first = self.parallel_devices[0]
        return first if first.type == "cpu" else torch.device(first.type, bagua.get_local_rank())

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices or ())

    def set_world_ranks(self) -> None:
        """Updates Lightning's ranks. Called while the trainer is constructed."""
        self._environment.ranks_changed()

    @property
    def _is_alone(self) -> bool:
        """Whether this worker evaluates alone: before the training, where a joiner evaluates too, and behind it."""
        trainer = self.lightning_module.trainer
        return self._has_trained or trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING

    def _place(self) -> tuple[int, int]:
        return (0, 1) if self._is_alone else (bagua.get_rank(), bagua.get_world_size())

    def _configure_launcher(self) -> None:
        if not bagua.is_launched() and self.num_processes * self.num_nodes > 1:
            self._launcher = BaguaLauncher(self.num_processes, self.num_nodes)

    # -- the model

    def setup_environment(self) -> None:
        self._environment.join()
        super().setup_environment()
        # The trainer's own sampler would keep the ranks of the start; see process_dataloader.
        connector = self.lightning_module.trainer._accelerator_connector
        if self._divides_evaluations is None:  # fit() may come behind validate()
            self._divides_evaluations = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def setup(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            check_trainer(trainer, runtime.engine().states.phase is Phase.ENDED)
        if self._layer_sync is not None and is_fitting:
            self.model = bagua.SyncBatchNorm.convert(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        collectives.connect_metrics(self.lightning_module, self._place)
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if is_fitting:
            self._state = TrainerState(trainer)
            self.model = bagua.DistributedDataParallel(
                self.lightning_module, self.optimizers, self._algorithm, **self._wrapping
            )
            self._register_state(trainer)

    def _register_state(self, trainer: Any) -> None:
        for index, config in enumerate(self.lr_scheduler_configs):
            bagua.register_state(f"lightning.scheduler{index}", config.scheduler)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None:
            bagua.register_state("lightning.scaler", scaler)
        for index, callback in enumerate(trainer.callbacks):
            # Of WeightAveraging: its state_dict has no weights
            average = getattr(callback, "_average_model", None)
            if isinstance(average, torch.nn.Module):
                bagua.register_state(f"lightning.average{index}", average)
        bagua.register_state("lightning.trainer", self._state)

    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.lightning_module.validation_step(*args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Announces the backward: in manual optimization the wrapper's forward, which contains it, does not."""
        runtime.engine().backward_begins()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Blocks nothing: gradients that accumulate over several batches are reduced in each, so no worker holds its
        own."""
        yield

    # -- loaders and steps

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        if trainer.state.stage != RunningStage.TRAINING:
            if not self._divides_evaluations or trainer.state.fn != TrainerFn.FITTING:
                return dataloader
            batches = shared(dataloader, self._place)
            if batches is not dataloader:
                check_divided_validation(trainer)
            return batches
        if self._batches is not None:
            raise UnsupportedInElasticJob(
                "strategy='bagua' trains from one loader, whose batches are the job's steps; combine the data sets"
            )
        self._batches = elastic(dataloader, self._global_batch_size, self.num_processes * self.num_nodes)
        return self._batches

    def on_train_start(self) -> None:
        trainer = self.lightning_module.trainer
        assert self._batches is not None
        epoch, batch = self._resumed_at(trainer.fit_loop)
        if epoch or batch:  # the trainer goes on from a checkpoint of its own
            self._batches.loader.seek({"epoch": epoch, "batch": batch})
        self._steps = TrainerSteps(trainer, self._batches, self._state, self._environment.ranks_changed)
        self._steps.attach()
        self._steps.begin()

    def _resumed_at(self, fit_loop: Any) -> tuple[int, int]:
        """Returns the epoch and batch behind those of the trainer's checkpoint. In one that on_train_batch_end saved,
        the batch is processed and not yet completed."""
        epoch, loop = fit_loop.epoch_progress.current.processed, fit_loop.epoch_loop
        if not fit_loop.restarting:
            return epoch, 0
        if not loop.batch_progress.is_last_batch:
            return epoch, loop.batch_progress.current.processed
        if self._batches is not None and self._batches.is_stream and loop.restarted_on_train_batch_end:
            # the trainer itself sees by the length alone that no batch of that epoch is left
            loop.restarting = False
            loop.reset_restart_stage()
        return epoch + loop.restarted_on_last, 0  # saved behind a validation, before the epoch counts

    def on_train_end(self) -> None:
        if not runtime.engine().finish():
            raise RuntimeError(
                "this worker was left out of the job at its end and has joined it again; it ends, and its successor "
                "receives the state"
            )
        self._has_trained = True

    def teardown(self) -> None:
        if self._steps is not None:
            self._steps.detach()
            self._steps = None
        if self._batches is not None:
            self._batches.loader.close()
            self._batches = None
        super().teardown()

    # -- collectives

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._is_alone or not isinstance(tensor, torch.Tensor):
            return tensor
        return collectives.reduce(tensor, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._is_alone else collectives.decided(decision, all, self.root_device)

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        if sync_grads:
            raise UnsupportedInElasticJob(
                "all_gather(sync_grads=True) is not available under strategy='bagua': gradients pass no collective"
            )
        return tensor.unsqueeze(0) if self._is_alone else bagua.allgather(tensor)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._has_trained else bagua.broadcast_object(obj, src)

    def barrier(self, name: str | None = None) -> None:
        if not self._has_trained:
            bagua.barrier()


def register() -> None:
    """Registers `strategy="bagua"` with Lightning, which has no entry points for strategies."""
    if "bagua" not in StrategyRegistry:
        StrategyRegistry.register("bagua", BaguaStrategy, description=BaguaStrategy.__doc__)
