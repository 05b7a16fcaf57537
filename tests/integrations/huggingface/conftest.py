"""Trainers of the tests' script in this process, a world of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import bagua_core as bagua

SAMPLES = 96  # 4 batches an epoch


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """make(callbacks=, epochs=, model=, global_batch_size=, **arguments): a trainer of the tests' script.

    The training of an earlier one ends.
    """
    from bagua_core.integrations.huggingface import ElasticTrainer, ElasticTrainingArguments
    from tests.integrations.huggingface import train_transformers as script

    (tmp_path / "hurry").touch()

    def trainer(
        callbacks: Any = (),
        epochs: int = 2,
        model: Any = script.Tagger,
        global_batch_size: int | None = None,
        **arguments: Any,
    ) -> Any:
        bagua.shutdown()
        torch.manual_seed(1)
        return ElasticTrainer(
            model(),
            ElasticTrainingArguments(
                **script.arguments_for(tmp_path, epochs, **{"eval_steps": 3, "save_steps": 3, **arguments})
            ),
            train_dataset=script.Tokens(SAMPLES),
            eval_dataset=script.Tokens(10),
            callbacks=[script.Pace(tmp_path), *callbacks],
            global_batch_size=global_batch_size,
        )

    yield trainer
    bagua.shutdown()
