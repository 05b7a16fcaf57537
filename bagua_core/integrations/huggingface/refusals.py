"""Refuses what an elastic job cannot have of accelerate, each with one error that names the alternative."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bagua_core.integrations.loader_settings import UnsupportedInElasticJob

_CHECKPOINT = "start the job with bagua-launch --checkpoint-dir, which also keeps the place in the data"
METHODS = {
    "save_state": _CHECKPOINT,
    "load_state": _CHECKPOINT,
    "skip_first_batches": "the loader continues at the job's place by itself",
    "split_between_processes": "divide by accelerator.process_index and num_processes",
    "join_uneven_inputs": "shares of a batch may differ already",
    "main_process_first": "prepare files before the job starts",
    "local_main_process_first": "prepare files before the job starts",
}
_PLUGINS = (
    *("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin"),
    *("torch_tp_plugin", "parallelism_config"),
)
_PRECISIONS = ("no", "bf16")


def check_arguments(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Checks the arguments of Accelerator and its environment. Raises UnsupportedInElasticJob."""
    for text in _reasons(arguments, environment):
        raise UnsupportedInElasticJob(f"ElasticAccelerator: {text}")


def check_precision(name: str) -> None:
    """Checks the name of the mixed precision. Raises UnsupportedInElasticJob."""
    if name not in _PRECISIONS:
        raise UnsupportedInElasticJob(
            f"ElasticAccelerator: mixed_precision={name!r} is none of {', '.join(_PRECISIONS)}"
        )


def _reasons(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Returns a text for each setting that does not go with an elastic job; none if all do."""
    reasons = [
        f"{name} does not go with workers that join and leave; bagua-launch runs such a script with accelerate's "
        "own Accelerator, and starts it again after a change"
        for name in _PLUGINS
        if arguments.get(name) is not None
    ]
    for name in ("dynamo_backend", "dynamo_plugin"):
        if arguments.get(name) is not None:
            reasons.append(f"{name} is not supported; call torch.compile before prepare()")
    if getattr(arguments.get("dataloader_config"), "dispatch_batches", None):
        reasons.append("dispatch_batches has one worker read for all; leave it out, and each reads its share")
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if environment.get(name, "").lower() in ("1", "true"):
            reasons.append(f"{name} is set in the environment; unset it")
    return reasons


def refused(name: str) -> Callable[..., Any]:
    """Returns a method that raises UnsupportedInElasticJob."""

    def refuse(self: Any, *arguments: Any, **keywords: Any) -> Any:
        raise UnsupportedInElasticJob(
            f"ElasticAccelerator.{name}() does not go with an elastic job: {METHODS[name]}"
        )

    return refuse
