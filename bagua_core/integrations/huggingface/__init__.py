"""Runs accelerate's loops and transformers' Trainer as elastic jobs: `ElasticAccelerator("bytegrad")`, and
`ElasticTrainer(model, ElasticTrainingArguments(...))`. See docs/huggingface.md.

Names are imported when they are used: a loop of accelerate's needs no transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bagua_core.integrations.huggingface.elastic_accelerator import ElasticAccelerator
    from bagua_core.integrations.huggingface.elastic_trainer import ElasticTrainer
    from bagua_core.integrations.huggingface.train_loader import TrainLoader
    from bagua_core.integrations.huggingface.trainer_arguments import ElasticTrainingArguments

_MODULES = {
    "ElasticAccelerator": "elastic_accelerator",
    "ElasticTrainer": "elastic_trainer",
    "ElasticTrainingArguments": "trainer_arguments",
    "TrainLoader": "train_loader",
}

__all__ = ["ElasticAccelerator", "ElasticTrainer", "ElasticTrainingArguments", "TrainLoader"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
