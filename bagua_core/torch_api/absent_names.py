"""Lists the names of the original that do not exist here, each with the way to go.

Asking a module of this package for one of these raises NotOfferedError with the reason, asking for any other unknown
name the usual AttributeError.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from bagua_core.torch_api.errors import not_offered

_PACKAGE = "bagua_core.torch_api"
_AUTOTUNE = "the job's leader tunes, and no service of its own; start the job with --autotune-level 1"
_TENSORS = "tensors are passed to collectives and hold their gradients as they are; leave the conversion out"
_RUNS_IN_CORE = (
    "this algorithm runs in the core, whose implementation is not made of hooks; pass the Algorithm to with_bagua, or "
    "write one of your own (docs/original-scripts.md, docs/algorithms.md)"
)
_NCCL = "workers connect by themselves; call init_process_group()"

ABSENT: dict[str, str] = {
    "BaguaTensor": _TENSORS,
    "tensor.BaguaTensor": _TENSORS,
    "bagua_init": "call model.with_bagua([optimizer], algorithm), which returns the model",
    "get_backend": _NCCL,
    "communication.get_backend": _NCCL,
    "communication.init_bagua_communicator": "call new_group().get_global_communicator()",
    "communication.broadcast_nccl_unique_id": _NCCL,
    "communication.get_hyperparameters_service_client": _AUTOTUNE,
    "communication.start_autotune_server": _AUTOTUNE,
    "communication.run_flask_app": _AUTOTUNE,
    "env.get_autotune_level": _AUTOTUNE,
    "env.get_autotune_max_samples": _AUTOTUNE,
    "env.get_autotune_sampling_confidence_time_s": _AUTOTUNE,
    "env.get_autotune_warmup_time_s": _AUTOTUNE,
    "env.get_is_output_autotune_log": _AUTOTUNE,
    "env.get_bagua_service_port": _AUTOTUNE,
    "env.get_autotune_server_addr": _AUTOTUNE,
    "env.is_report_metrics_switch_on": "call bagua.report(loss=...), which shows numbers beside the progress",
    "env.get_master_addr": "workers meet through their agents and may change their addresses; leave it out",
    "utils.StatisticalAverage": "it served the autotuning service; call bagua.report(speed=...) to show a number",
    "utils.average_by_removing_extreme_values": "it served the autotuning service; use numpy",
    "utils.apply_flattened_call": "call allreduce_coalesced_inplace or broadcast_coalesced",
    "utils.apply_flattened_call_all": "call allreduce_coalesced_inplace or broadcast_coalesced",
    "utils.to_bagua_datatype": _TENSORS,
    "utils.to_bagua_reduce_op": "pass a bagua.ReduceOp",
    "utils.check_contiguous": "gradients lie in buckets anyway",
    "algorithms.onebit_adam": "it became q_adam; use q_adam.QAdamOptimizer and QAdamAlgorithm(optimizer, bits=1)",
    "algorithms.decentralized.DecentralizedAlgorithmImpl": _RUNS_IN_CORE,
    "algorithms.decentralized.LowPrecisionDecentralizedAlgorithmImpl": _RUNS_IN_CORE,
    "algorithms.q_adam.QAdamAlgorithmImpl": _RUNS_IN_CORE,
    "algorithms.async_model_average.AsyncModelAverageAlgorithmImpl": _RUNS_IN_CORE,
    "contrib.cache_loader.BatchFetcher": (
        "CacheLoader buffers writes by itself (writer_buffer_size); call get, get_many and flush, or its store"
    ),
    "contrib.cache_loader.serialize": "values are encoded without pickle; CacheLoader(pickle=True) allows other types",
    "contrib.cache_loader.deserialize": "values are encoded without pickle; CacheLoader.get decodes them",
}


def offer_alternatives() -> None:
    """Makes each module that is named in ABSENT refuse its names."""
    for where in {name.rpartition(".")[0] for name in ABSENT}:
        module: Any = importlib.import_module(".".join(filter(None, (_PACKAGE, where))))
        module.__getattr__ = functools.partial(_refuse, where)


def _refuse(where: str, name: str) -> object:
    full = f"{where}.{name}" if where else name
    if full in ABSENT:
        raise not_offered(full, ABSENT[full])
    module = ".".join(filter(None, (_PACKAGE, where)))
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
