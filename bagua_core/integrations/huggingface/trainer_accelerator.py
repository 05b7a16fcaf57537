"""The accelerator that ElasticTrainer makes: ElasticAccelerator with what only transformers' Trainer needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import bagua_core as bagua
from bagua_core.integrations.evaluation_batches import Placed, shared
from bagua_core.integrations.huggingface.elastic_accelerator import ElasticAccelerator
from bagua_core.integrations.huggingface.step_loss import StepLoss
from bagua_core.integrations.huggingface.train_loader import TrainLoader


class TrainerAccelerator(ElasticAccelerator):
    """An ElasticAccelerator for transformers' Trainer.

    loss: sees each loss before its backward. max_local_batch_size: see ElasticDataLoader.

    Collectives are the job's from `begin` to `end`, when all workers are in the training loop. Outside of it each
    worker evaluates by itself, as one process does.
    """

    def __init__(self, *arguments: Any, loss: StepLoss, max_local_batch_size: int, **keywords: Any) -> None:
        self._loss = loss
        self._max_local_batch_size = max_local_batch_size
        self._is_together = False
        self._makes_train_loader = False
        self._ranks_changed: Callable[[], None] = lambda: None
        self._number = random.SystemRandom().getrandbits(62)  # names this worker in a list of all
        super().__init__(*arguments, **keywords)

    def begin(self, ranks_changed: Callable[[], None]) -> None:
        """Makes collectives the job's. ranks_changed(): called whenever ranks may be others."""
        self._is_together = True
        self._ranks_changed = ranks_changed

    def end(self) -> None:
        self._is_together = False

    @property
    def num_processes(self) -> int:
        """The number 1, for the trainer multiplies losses by it, to undo an average over processes."""
        return 1

    def _follow_ranks(self) -> None:
        super()._follow_ranks()
        self._ranks_changed()

    # -- loaders and the model

    @contextmanager
    def making_train_loader(self) -> Iterator[None]:
        """Marks the DataLoader that is prepared within as the train loader; all others are for evaluation."""
        self._makes_train_loader = True
        try:
            yield
        finally:
            self._makes_train_loader = False

    def _loader(self, loader: DataLoader[Any], placed: Placed) -> object:
        if self._makes_train_loader:
            return self._as_train_loader(loader, placed, self._max_local_batch_size)
        return shared(loader, self._place, placed)

    def train_loader(self, loader: DataLoader[Any]) -> TrainLoader:
        return self._as_train_loader(loader, self._placed, self._max_local_batch_size)

    def _place(self) -> tuple[int, int]:
        """Returns this worker's place in a list that is the same on all workers, and its length. Ranks are not: after a
        loss in a collective the workers that had finished it learn of the loss later than the others."""
        if not self._is_together:
            return 0, 1
        numbers = (
            bagua.allgather(torch.tensor([self._number], dtype=torch.int64, device="cpu")).flatten().tolist()
        )
        return numbers.index(self._number), len(numbers)

    def _wrapping(self) -> dict[str, Any]:
        handler = self.ddp_handler
        return {
            "find_unused_parameters": handler.find_unused_parameters,
            "broadcast_buffers": handler.broadcast_buffers,
            "bucket_cap_mb": handler.bucket_cap_mb,
        }

    def prepare_model(self, model: torch.nn.Module, *arguments: Any, **keywords: Any) -> Any:
        if keywords.get("evaluation_mode"):
            return Accelerator.prepare_model(self, model, *arguments, **keywords)
        return super().prepare_model(model, *arguments, **keywords)

    def backward(self, loss: torch.Tensor, **keywords: Any) -> None:
        super().backward(self._loss.before_backward(loss), **keywords)

    # -- collectives

    def gather(self, tensor: Any) -> Any:
        return super().gather(tensor) if self._is_together else tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        return super().gather_for_metrics(input_data, use_gather_object) if self._is_together else input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return super().reduce(tensor, reduction, scale) if self._is_together else tensor

    def wait_for_everyone(self) -> None:
        if self._is_together:
            super().wait_for_everyone()

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        return (
            super().pad_across_processes(tensor, dim, pad_index, pad_first) if self._is_together else tensor
        )
