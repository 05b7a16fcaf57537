"""Provides ElasticTrainingArguments: transformers' TrainingArguments for a worker whose job's size changes.

They decide on devices and ranks while they are constructed, before there is a trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments

import bagua_core as bagua
from bagua_core.integrations.huggingface.elastic_accelerator import single_process


@dataclass
class ElasticTrainingArguments(TrainingArguments):
    """The TrainingArguments of a worker of an elastic job.

    `per_device_train_batch_size` is the most samples that a worker takes at once; a batch of the job has that many
    times `gradient_accumulation_steps`, with any number of workers.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        """The worker's own device: set up as for one process with one device, with the worker's rank."""
        bagua.init_process_group()
        with single_process():
            device: torch.device = super()._setup_devices
        if device.type == "cuda":
            device = torch.device("cuda", bagua.get_local_rank())
            torch.cuda.set_device(device)
        self._n_gpu: int = min(self._n_gpu, 1)  # more would be DataParallel's
        state = PartialState()
        state.process_index, state.local_process_index = bagua.get_rank(), bagua.get_local_rank()
        return device
