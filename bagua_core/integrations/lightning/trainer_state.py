"""The trainer's progress as a part of the job's state: what a failed step restores and a joiner receives.

The whole job has in common: the loops' counters, the callbacks' states, the metrics of the last validation, the wish to
stop. Each worker has its own: what it has summed up of the metrics of this epoch. A roll-back restores that too; a copy
from another worker leaves it alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.states import RunningStage
from torchmetrics import Metric


class TrainerState:
    """Implements step_interface.Stateful for one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._worker = os.environ.get("BAGUA_WORKER_ID", "")

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        callbacks = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        return {
            "loops": trainer.fit_loop.state_dict(),
            "callbacks": {key: state for key, state in callbacks.items() if state},
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "should_stop": trainer.should_stop,
            "worker": self._worker,
            "own": self.own(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        _put_counters(trainer.fit_loop, state["loops"])
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                elapsed_s = callback.time_elapsed() if isinstance(callback, Timer) else 0.0
                callback.load_state_dict(state["callbacks"][callback.state_key])
                if isinstance(callback, Timer):
                    _go_on(callback, elapsed_s)
        trainer._logger_connector._callback_metrics.update(state["metrics"])
        trainer.should_stop = state["should_stop"]
        if state["worker"] == self._worker:
            self._put_own(state["own"])

    def forget_own_batch(self, before: dict[str, Any]) -> None:
        """Takes a batch without a share out of this worker's sums. before: `own()` as it was before the batch.

        What the batch was the first to log stays known, at its neutral value: at the epoch's end all workers reduce the
        same metrics.
        """
        for key, item in self._results().items():
            if item.is_tensor:
                kept = before["logged"].get(key)
                item.value = item._defaults["value"].clone() if kept is None else kept["value"]
                if hasattr(item, "cumulated_batch_size"):
                    item.cumulated_batch_size = (
                        torch.tensor(0, dtype=torch.int64, device="cpu") if kept is None else kept["count"]
                    )
        for name, metric in self._metrics():
            sums = before["modules"][name]["values"]
            # a list that is empty on one worker only can't be gathered
            _put_values(metric, {state: kept for state, kept in sums.items() if not _is_empty_list(kept)})

    def own(self) -> dict[str, Any]:
        """Returns this worker's own sums of metrics in this epoch."""
        connector = self._trainer._logger_connector
        return {
            "logged": {key: _logged(item) for key, item in self._results().items() if item.is_tensor},
            "modules": {name: _sums(metric) for name, metric in self._metrics()},
            "first": connector._first_loop_iter,
            "hook": connector._current_fx,
        }

    def _put_own(self, own: dict[str, Any]) -> None:
        connector, results = self._trainer._logger_connector, self._results()
        connector._first_loop_iter, connector._current_fx = own["first"], own["hook"]
        for key in [key for key, item in results.items() if item.is_tensor and key not in own["logged"]]:
            del results[key]  # first logged in the step that failed
        for key, values in own["logged"].items():
            if key in results:
                _put_logged(results[key], values)
        for name, metric in self._metrics():
            if name in own["modules"]:
                _put_sums(metric, own["modules"][name])

    def _results(self) -> Any:
        return self._trainer.fit_loop.epoch_loop._results

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        """Yields the torchmetrics of the script's module, by name."""
        for name, module in self._trainer.lightning_module.named_modules():
            if isinstance(module, Metric):
                yield name, module


def _put_counters(loop: Any, state: dict[str, Any], prefix: str = "") -> None:
    """Loads the counters of a loop. Its own load_state_dict would also have it begin again as after a restart."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, inner in vars(loop).items():
        if isinstance(inner, _Loop):
            _put_counters(inner, state, f"{prefix}{name}.")


def _go_on(timer: Any, elapsed_s: float) -> None:
    """Has a timer that has just loaded a state go on from there, or from its own time if that is more: a step that is
    rolled back has taken time. Its load_state_dict adds the loaded time to all that it has measured itself."""
    timer._offset = max(timer._offset, elapsed_s)
    if timer._start_time[RunningStage.TRAINING] is not None:
        timer._start_time[RunningStage.TRAINING] = time.monotonic()


def _logged(item: Any) -> dict[str, Any]:
    """Returns what self.log() has summed up under one name. Tensors are replaced and not changed in place."""
    count = getattr(item, "cumulated_batch_size", None)
    return {
        "value": item.value,
        "count": count,
        "latest": item._forward_cache,
        "reset": item.has_reset,
        "updates": item._update_count,
    }


def _put_logged(item: Any, values: dict[str, Any]) -> None:
    item.value, item._forward_cache = values["value"], values["latest"]
    item.has_reset, item._update_count = values["reset"], values["updates"]
    item._computed = None
    if values["count"] is not None:
        item.cumulated_batch_size = values["count"]


def _sums(metric: Metric) -> dict[str, Any]:
    """Returns a metric's sums: copies of tensors, and of a list, which only grows within an epoch, its length."""
    values = {name: getattr(metric, name) for name in metric._defaults}
    kept = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else len(value)
        for name, value in values.items()
    }
    return {"values": kept, "updates": metric._update_count}


def _put_sums(metric: Metric, sums: dict[str, Any]) -> None:
    _put_values(metric, sums["values"])
    metric._update_count = sums["updates"]


def _is_empty_list(kept: Any) -> bool:
    return isinstance(kept, int) and kept == 0


def _put_values(metric: Metric, values: dict[str, Any]) -> None:
    for name, kept in values.items():
        if isinstance(kept, int):
            del getattr(metric, name)[kept:]
        else:
            setattr(metric, name, kept.clone())
    metric._computed = None
