"""What ElasticTrainer refuses, and what it asks of arguments and imports."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua_core.integrations.loader_settings import UnsupportedInElasticJob


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object"),
        ({"optim": "galore_adamw_layerwise", "optim_target_modules": "all"}, "optim=.*backward"),
    ],
)
def test_arguments_are_refused(make: Callable[..., Any], arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedInElasticJob, match=named):
        make(**arguments)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config", "torch_compile", "fp16"])
def test_what_cannot_be_set_here_is_refused(make: Callable[..., Any], name: str) -> None:
    """These arguments ask for packages or devices when they are constructed."""
    from bagua_core.integrations.huggingface.trainer_refusals import check_trainer

    trainer = make()
    setattr(trainer.args, name, True)
    with pytest.raises(UnsupportedInElasticJob, match=name):
        check_trainer(trainer)


def test_arguments_are_read_from_a_command_line(tmp_path: Path) -> None:
    from transformers import HfArgumentParser

    from bagua_core.integrations.huggingface import ElasticTrainingArguments

    words = ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none", "--learning_rate", "0.5"]
    (arguments,) = HfArgumentParser(ElasticTrainingArguments).parse_args_into_dataclasses(words)
    assert type(arguments) is ElasticTrainingArguments and arguments.learning_rate == 0.5
    assert arguments.process_index == 0 and arguments.device == torch.device("cpu")


def test_arguments_of_transformers_are_refused(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from bagua_core.integrations.huggingface import ElasticTrainer

    with pytest.raises(UnsupportedInElasticJob, match="ElasticTrainingArguments as TrainingArguments"):
        ElasticTrainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


@pytest.mark.parametrize(
    ("arguments", "named"), [({"per_device_eval_batch_size": 1}, "per_device_eval_batch_size=1")]
)
def test_trainings_are_refused(make: Callable[..., Any], arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedInElasticJob, match=named):
        make(**arguments).train()


def test_a_checkpoint_within_a_stream_is_refused(make: Callable[..., Any], tmp_path: Path) -> None:
    """It counts steps, and not the epochs of the stream."""
    from tests.integrations.huggingface import train_transformers as script

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            tokens = script.Tokens(48)
            return iter([tokens[i] for i in range(48)])

    for more in ({}, {"resume_from_checkpoint": str(tmp_path / "saved" / "checkpoint-3")}):
        trainer = make(max_steps=5, load_best_model_at_end=False)
        trainer.train_dataset = Stream()
        if more:
            with pytest.raises(UnsupportedInElasticJob, match=r"which epoch of Stream.*--checkpoint-dir"):
                trainer.train(**more)
        else:
            assert trainer.train(**more).global_step == 5


def test_a_second_training_is_refused(make: Callable[..., Any]) -> None:
    trainer = make(epochs=1)
    trainer.train()
    with pytest.raises(UnsupportedInElasticJob, match=r"bagua_core\.shutdown"):
        trainer.train()


def test_a_loop_of_accelerate_imports_no_transformers() -> None:
    from bagua_core.integrations.huggingface import elastic_accelerator

    folder = Path(elastic_accelerator.__file__).parent
    for name in ("__init__", "elastic_accelerator", "train_loader", "refusals"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        imported = {
            part
            for node in ast.walk(tree)
            for part in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else []
            )
        }
        assert not any(one.startswith("transformers") for one in imported), name
