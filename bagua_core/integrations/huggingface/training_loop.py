"""The loop in which ElasticTrainer trains. A batch is a step of the job, and ends right behind the optimizer.

What follows (the scheduler, on_step_end, logs, evaluations, checkpoints) sees committed steps only, each once. What is
in a step is Trainer's: its methods compute, clip, log, evaluate and save.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import Trainer, optimization
from transformers.trainer_callback import (
    DefaultFlowCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
)
from transformers.trainer_utils import has_length

import bagua_core as bagua
from bagua_core.elastic.step import runtime
from bagua_core.elastic.step.step_states import Phase
from bagua_core.integrations.huggingface import reporting
from bagua_core.integrations.huggingface.step_loss import StepLoss
from bagua_core.integrations.huggingface.train_loader import TrainLoader
from bagua_core.integrations.huggingface.trainer_refusals import check_resumption, check_training
from bagua_core.integrations.huggingface.trainer_state import TrainerProgress
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob

# versions that are refused have no GreedyLR
_STEP_BEHIND_EVALUATIONS = (ReduceLROnPlateau, getattr(optimization, "GreedyLR", ReduceLROnPlateau))


class TrainingLoop(Trainer):
    """A Trainer that trains in steps of the job. Its accelerator is a TrainerAccelerator."""

    control: TrainerControl
    _step_loss: StepLoss
    _total_batch_size: int  # samples of a step, over all workers
    _epoch_steps: int  # of a stream without a length: max_steps, as Trainer counts

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        check_training(self, trial, runtime.engine().states.phase is Phase.ENDED)
        self._ignored_keys = ignore_keys_for_eval
        self.accelerator.free_memory()
        with self._one_batch_per_update():
            loader = self._make_train_loader()
            found = self.set_initial_training_values(args, loader)
            epochs, updates, _, samples, _, self._epoch_steps, max_steps = found
            epoch, batch = self._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, None)
            model, _ = self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
            if epoch or batch:  # on from a checkpoint of the trainer's own
                check_resumption(loader)
                loader.seek({"epoch": epoch, "batch": batch})
            self._start_s = time.time()
            self._begin_counting(model)
            self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
            reporting.share_folders(self.callback_handler.callbacks)
            if args.eval_on_start:
                self._evaluate(None, ignore_keys_for_eval, skip_scheduler=True)
            self.accelerator.begin(self._ranks_changed)
            try:
                self._train_epochs(model, loader, epochs)
            finally:
                self.accelerator.end()
                loader.close()
            return self._finalize_training(None, samples, self._start_s)

    @contextmanager
    def _one_batch_per_update(self) -> Iterator[None]:
        """Sets gradient_accumulation_steps to 1: Trainer's methods count batches, of which the loader has one for each
        optimizer step."""
        accumulated = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1
        try:
            yield
        finally:
            self.args.gradient_accumulation_steps = accumulated

    def _begin_counting(self, model: torch.nn.Module) -> None:
        """Initializes what Trainer's loop counts, and registers it as the job's state."""
        self.current_gradient_accumulation_steps = 1  # micro-batches count by their samples
        self.accelerator.gradient_state._set_sync_gradients(True)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.zeros((), dtype=torch.float64, device=self.args.device)
        self._flops = torch.zeros_like(self._tr_loss)
        self._total_loss_scalar = 0.0
        self._ranks_changed()
        model.zero_grad()
        bagua.register_state("huggingface.scheduler", self.lr_scheduler)
        bagua.register_state("huggingface.trainer", TrainerProgress(self))

    def _train_epochs(self, model: torch.nn.Module, loader: TrainLoader, epochs: int) -> None:
        while True:
            for epoch in loader.epochs(epochs):
                self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
                logged = self._train_epoch(model, loader, epoch)
                self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
                self._log_save_evaluate(model, epoch, *logged)
                if self.control.should_training_stop:
                    break
            else:
                return
            if runtime.engine().finish():
                return
            # left out of the job at its end and taken in again: the state that it copied says what is left to do

    def _train_epoch(self, model: torch.nn.Module, loader: TrainLoader, epoch: int) -> tuple[Any, Any]:
        """Trains the rest of the job's epoch. Returns the last gradient norm and learning rate, for the log."""
        norm = rate = items = None
        begins = True
        for inputs in loader:
            if begins:
                items = self._begin_step(loader, epoch)
            self._step_loss.note_flops(float(self.floating_point_ops(inputs)))
            self.training_step(model, inputs, items)
            begins = runtime.engine().micro_batch.last
            if not begins:
                continue
            batch = loader.position()["batch"]
            norm, rate = self._update(model)
            if self._end_step(loader):
                self._count_step(epoch + (batch + 1) / self._epoch_steps)
                self._log_save_evaluate(model, epoch, norm, rate)
            if self.control.should_training_stop:
                break
            if self.control.should_epoch_stop:
                raise UnsupportedInElasticJob(
                    "ElasticTrainer: should_epoch_stop would end an epoch that the job's data goes on with; use "
                    "should_training_stop, or a torch.utils.data.Subset"
                )
        return norm, rate

    def _begin_step(self, loader: TrainLoader, epoch: int) -> torch.Tensor | None:
        """Begins a step. Returns the items of its samples, over all workers, if losses are divided by them."""
        if runtime.engine().joining:  # by the place, until the state brings what the others have counted
            if has_length(loader):
                self.state.global_step = epoch * len(loader) + loader.position()["batch"]
            else:
                self.state.global_step = self._initial_global_step + loader.step
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        items: torch.Tensor | None = self._get_num_items_in_batch(loader.step_batches, self.args.device)
        if items is not None:
            own = torch.as_tensor(items, dtype=torch.int64, device=self.args.device) * int(loader.has_share)
            items = bagua.allreduce(own.reshape(1)).clamp(min=1)[0]
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        self._step_loss.begin(is_over_items=is_scaled and items is not None)
        return items

    def _update(self, model: torch.nn.Module) -> tuple[Any, float]:
        norm = self._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = self._get_grad_norm(model, grad_norm=norm)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.optimizer.step()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        rate = self._get_learning_rate()
        model.zero_grad()
        loss = self._step_loss.loss
        if self.args.logging_nan_inf_filter:
            steps = 1 + self.state.global_step - self._globalstep_last_logged
            loss = torch.where(torch.isfinite(loss), loss, self._tr_loss / steps)
        self._tr_loss = self._tr_loss + loss
        self._flops = self._flops + self._step_loss.flops
        return norm, rate

    def _end_step(self, loader: TrainLoader) -> bool:
        """Ends the step. Returns whether it is committed and to be counted. A failed one is drawn again."""
        counted = self.state.global_step
        has_moved = loader.end_step(confirmed=self._is_followed_by_collectives(loader))
        # A worker that was behind copies the state, which may be of a moment at which the step was counted.
        return has_moved and self.state.global_step == counted

    def _is_followed_by_collectives(self, loader: TrainLoader) -> bool:
        """Tells whether collectives of all workers may follow behind this step."""
        if loader.is_at_last_batch or self._has_callback_of_script:
            return True
        state = copy.copy(self.state)
        state.global_step += 1
        control = DefaultFlowCallback().on_step_end(self.args, state, TrainerControl())
        return bool(control.should_evaluate or control.should_save or control.should_training_stop)

    @property
    def _has_callback_of_script(self) -> bool:
        """Whether the script has a callback of its own for the end of a step: it may request an evaluation there."""
        return any(
            type(callback).on_step_end is not TrainerCallback.on_step_end
            and not type(callback).__module__.startswith("transformers.")
            for callback in self.callback_handler.callbacks
        )

    def _count_step(self, epoch: float) -> None:
        if not isinstance(self.lr_scheduler, _STEP_BEHIND_EVALUATIONS):
            self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)

    def _log_save_evaluate(self, model: torch.nn.Module, epoch: int, norm: Any, rate: Any) -> None:
        self._maybe_log_save_evaluate(
            self._tr_loss, norm, model, None, epoch, self._ignored_keys, self._start_s, learning_rate=rate
        )

    def store_flos(self) -> None:
        if self.is_in_train:
            self.state.total_flos += self._flops.item()
            self._flops = torch.zeros_like(self._flops)

    def _make_train_loader(self) -> TrainLoader:
        with self.accelerator.making_train_loader():
            loader: object = self.get_train_dataloader()
        if isinstance(loader, DataLoader):  # of a get_train_dataloader of the script's own
            loader = self.accelerator.train_loader(loader)
        if not isinstance(loader, TrainLoader):
            raise UnsupportedInElasticJob(
                f"ElasticTrainer trains from a torch DataLoader, and get_train_dataloader() returned a "
                f"{type(loader).__name__}"
            )
        return loader

    def _ranks_changed(self) -> None:
        """Updates the trainer after a change of ranks. The main worker may be another one: it logs from now on."""
        was_main = self.state.is_world_process_zero
        # no other worker of a node prints: the one with local rank 0 may be lost
        self.state.is_local_process_zero = self.state.is_world_process_zero = self.is_world_process_zero()
        if self.state.is_world_process_zero and not was_main:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ProgressCallback):  # only a main worker has a bar
                    callback.on_train_begin(self.args, self.state, self.control)
                elif reporting.reports(callback):
                    reporting.begin_as_main(callback, self)
