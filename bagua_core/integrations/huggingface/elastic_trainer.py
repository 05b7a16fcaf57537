"""Provides ElasticTrainer: transformers' Trainer as a worker of an elastic job.

Owns what the trainer is made of, evaluations and the trainer's own checkpoints; training_loop.py trains.
docs/design/huggingface.md says why.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from accelerate.utils import find_batch_size

import bagua_core as bagua
from bagua_core.algorithms import Algorithm
from bagua_core.collectives import is_alone
from bagua_core.integrations.huggingface.step_loss import StepLoss
from bagua_core.integrations.huggingface.trainer_accelerator import TrainerAccelerator
from bagua_core.integrations.huggingface.trainer_arguments import ElasticTrainingArguments
from bagua_core.integrations.huggingface.trainer_refusals import check_trainer
from bagua_core.integrations.huggingface.training_loop import TrainingLoop
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob


class ElasticTrainer(TrainingLoop):
    """A Trainer whose process is a worker of an elastic job; see docs/huggingface.md.

    Use `trainer = ElasticTrainer(model, ElasticTrainingArguments(...), train_dataset=...)`.

    algorithm: a name, or an object of bagua_core.algorithms.
    global_batch_size: samples of one optimizer step over all workers; by default per_device_train_batch_size times
    gradient_accumulation_steps.
    The others as for Trainer. Raises UnsupportedInElasticJob.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *arguments: Any,
        algorithm: str | Algorithm = "gradient_allreduce",
        global_batch_size: int | None = None,
        **keywords: Any,
    ) -> None:
        self._algorithm = algorithm
        self._named_batch_size = global_batch_size
        self._step_loss = StepLoss()
        if args is None:
            args = ElasticTrainingArguments("tmp_trainer")
        super().__init__(model, args, *arguments, **keywords)

    # -- what the trainer is made of

    def create_accelerator_and_postprocess(self) -> None:
        check_trainer(self)
        args = self.args
        accumulated: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._total_batch_size = accumulated if self._named_batch_size is None else self._named_batch_size
        super().create_accelerator_and_postprocess()
        self.accelerator = TrainerAccelerator(
            self._algorithm,
            global_batch_size=self._total_batch_size,
            max_local_batch_size=self.args.per_device_train_batch_size,
            seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
            loss=self._step_loss,
            **self._accelerator_arguments,
        )
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **keywords: Any) -> dict[str, Any]:
        arguments: dict[str, Any] = super()._build_accelerator_args(**keywords)
        # that plugin is there even where torch_compile is off
        kept = {name: value for name, value in arguments.items() if name != "dynamo_plugin"}
        self._accelerator_arguments = kept
        return arguments

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._total_batch_size

    # -- evaluations and checkpoints

    def prediction_step(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *arguments, **keywords)
        return (None if loss is None else _of_samples(loss, inputs)), logits, labels

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Has the main worker save. If it is lost meanwhile, the next one does. A worker without peers waits for no
        other."""
        while True:
            self.accelerator._follow_ranks()  # a loss in the evaluation before may have changed them
            saves = bool(self.args.should_save)
            super()._save_checkpoint(model, trial)
            is_saved = bagua.allreduce(torch.tensor([int(saves)], dtype=torch.int64, device="cpu")).item()
            if is_saved or is_alone():
                break
        # the main worker alone has looked for it behind its own write
        self.state.best_model_checkpoint = bagua.broadcast_object(self.state.best_model_checkpoint)

    def _load_best_model(self) -> None:
        """Loads the best checkpoint. Raises UnsupportedInElasticJob if this worker can't see it."""
        if not os.path.isdir(self.state.best_model_checkpoint):
            raise UnsupportedInElasticJob(
                f"ElasticTrainer: load_best_model_at_end can't find {self.state.best_model_checkpoint}, which the main "
                "worker saved; use an output_dir that all nodes see"
            )
        super()._load_best_model()

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)


class _BatchLoss(torch.Tensor):
    """The mean loss of a batch, which the trainer repeats to weigh it: once for each sample of the batch."""

    samples: int

    def repeat(self, *sizes: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).repeat(self.samples)


def _of_samples(loss: torch.Tensor, inputs: Any) -> torch.Tensor:
    found = loss.as_subclass(_BatchLoss)
    found.samples = find_batch_size(inputs) or 1
    return found
