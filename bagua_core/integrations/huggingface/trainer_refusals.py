"""Refuses what ElasticTrainer cannot do, each with one error that names the alternative."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import has_length
from transformers.utils import is_torch_xla_available

from bagua_core.integrations.huggingface.train_loader import TrainLoader
from bagua_core.integrations.huggingface.trainer_arguments import ElasticTrainingArguments
from bagua_core.integrations.loader_settings import UnsupportedInElasticJob

OLDEST = "5.10"
_PARTS = ("_init_training_state", "_prepare_for_training", "_finalize_training", "_get_grad_norm")
_RESTARTS = "bagua-launch runs the script with transformers' own Trainer, and starts it again after a change"


def check_trainer(trainer: Any) -> None:
    """Checks the trainer, before it makes its accelerator. Raises UnsupportedInElasticJob."""
    for text in _reasons(trainer, trainer.args):
        raise UnsupportedInElasticJob(f"ElasticTrainer: {text}")


def check_training(trainer: Any, trial: object, has_trained: bool) -> None:
    """Checks the trainer, before it trains. Raises UnsupportedInElasticJob."""
    text = None
    if has_trained:
        text = "this process has trained; call bagua_core.shutdown() before it trains again"
    elif trial is not None:
        text = "hyperparameter_search() trains several times; start a job for each trial"
    elif trainer.eval_dataset is not None and trainer.args.eval_batch_size < 2:
        text = "per_device_eval_batch_size=1 can leave a worker without a share; use 2 or more"
    if text:
        raise UnsupportedInElasticJob(f"ElasticTrainer: {text}")


def check_resumption(loader: TrainLoader) -> None:
    """Checks that the trainer can continue within the data, from a checkpoint of its own.

    Raises UnsupportedInElasticJob.
    """
    if not has_length(loader):
        raise UnsupportedInElasticJob(
            "ElasticTrainer: resume_from_checkpoint: a checkpoint of the trainer does not say in which epoch of "
            f"{type(loader.dataset).__name__}, a stream without a length, it was; start the job with bagua-launch "
            "--checkpoint-dir, which keeps the place, or set ignore_data_skip to begin the stream again"
        )


def _reasons(trainer: Any, args: Any) -> list[str]:
    """Returns a text for each setting that does not go with an elastic job, most general first; none if all do."""
    if not all(hasattr(trainer, part) for part in _PARTS):
        return [f"transformers {transformers.__version__} is too old; install {OLDEST} or later"]
    if not isinstance(args, ElasticTrainingArguments):
        return [
            f"{type(args).__name__} has set up ranks that can't change: `from "
            "bagua_core.integrations.huggingface import ElasticTrainingArguments as TrainingArguments`"
        ]
    reasons = [
        f"{name} does not go with workers that join and leave; {_RESTARTS}"
        for name in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
        if _is_set(args, name)
    ]
    if is_torch_xla_available():
        reasons.append(f"torch_xla's devices are not supported; {_RESTARTS}")
    if args.fp16:
        reasons.append("fp16 is not supported; use bf16")
    if args.torch_compile:
        reasons.append("torch_compile is not supported; leave it out")
    if args.auto_find_batch_size:
        reasons.append("auto_find_batch_size changes the job's steps; name the batch size")
    if args.include_num_input_tokens_seen not in ("no", False):
        reasons.append("include_num_input_tokens_seen counts one worker's tokens; leave it out")
    if getattr(args, "enable_jit_checkpoint", False):
        reasons.append(
            "enable_jit_checkpoint handles the signals that bagua-launch does; use its --checkpoint-dir"
        )
    if args.batch_eval_metrics:
        reasons.append(
            "batch_eval_metrics is not supported; leave it out, and compute_metrics gets all batches"
        )
    if args.eval_use_gather_object:
        reasons.append("eval_use_gather_object is not supported; return tensors")
    if any(word in str(args.optim).lower() for word in ("layerwise", "lomo")):
        reasons.append(
            f"optim={args.optim} steps within backward, before the gradients are the job's; use another"
        )
    takes_items = "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters
    if args.label_smoothing_factor and not takes_items:
        reasons.append(
            "label_smoothing_factor needs a later transformers, which divides by the batch's tokens"
        )
    return reasons


def _is_set(args: Any, name: str) -> bool:
    """Tells whether the argument is set; fsdp_config is a dictionary of defaults where fsdp is off."""
    return bool(getattr(args, name, None)) and (name != "fsdp_config" or bool(args.fsdp))
