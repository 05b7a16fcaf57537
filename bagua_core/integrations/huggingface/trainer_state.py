"""The trainer's progress as a part of the job's state: what a failed step restores and a joiner receives."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

_OWN = ("is_local_process_zero", "is_world_process_zero")  # of this worker
_HISTORY = "log_history"
_LOGGED = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


class TrainerProgress:
    """Implements step_interface.Stateful for one trainer.

    Counters travel as JSON, in which the trainer itself writes them to its checkpoints.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._written = (-1, "")  # length of the history, and its JSON: it is long, and changes seldom

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        counters = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in (*_OWN, _HISTORY)
        }
        return {
            "counters": json.dumps(counters),
            "history": self._history(),
            "control": json.dumps(dataclasses.asdict(trainer.control)),
            "callbacks": json.dumps([callback.state()["attributes"] for callback in self._callbacks()]),
            "logged": [getattr(trainer, name) for name in _LOGGED],
            "sums": torch.stack([trainer._tr_loss, trainer._flops]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in json.loads(state["counters"]).items():
            setattr(trainer.state, name, value)
        if state["history"] != self._history():
            trainer.state.log_history = json.loads(state["history"])
            self._written = (-1, "")
        for name, value in json.loads(state["control"]).items():
            setattr(trainer.control, name, value)
        for callback, attributes in zip(self._callbacks(), json.loads(state["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        for name, value in zip(_LOGGED, state["logged"], strict=True):
            setattr(trainer, name, value)
        trainer._tr_loss, trainer._flops = state["sums"].to(trainer.args.device).clone()

    def _history(self) -> str:
        history = self._trainer.state.log_history
        if self._written[0] != len(history):
            self._written = (len(history), json.dumps(history))
        return self._written[1]

    def _callbacks(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
