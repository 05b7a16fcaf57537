"""The trainer's progress as a part of the job's state: what a failed step restores and a joiner receives."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

_OWN = ("is_local_process_zero", "is_world_process_zero")  # of this worker
_HISTORY = "log_history"
CHUNK = 1000
_LOGGED = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")


class HistoryText:
    """The JSON of a list to which entries are appended, in chunks of CHUNK entries; each entry is encoded once.

    A history is long, and a snapshot of it is taken before each step.
    """

    def __init__(self) -> None:
        self._closed: list[str] = []
        self._open: list[str] = []  # one text for each entry behind the closed chunks
        self._last: Any = None  # the last entry that is encoded

    def chunks(self, entries: list[Any]) -> list[str]:
        """Returns the JSON of each CHUNK of `entries`; the last chunk may be shorter."""
        known = len(self._closed) * CHUNK + len(self._open)
        if known > len(entries) or (known and entries[known - 1] is not self._last):
            self._closed, self._open, known = [], [], 0  # another history
        for entry in entries[known:]:
            self._last = entry
            self._open.append(json.dumps(entry))
            if len(self._open) == CHUNK:
                self._closed.append(_joined(self._open))
                self._open = []
        return [*self._closed, _joined(self._open)] if self._open else list(self._closed)

    def loaded(self, saved: str | list[str], entries: list[Any]) -> list[Any]:
        """Returns the entries that were saved; `entries` itself if it has the same. Only chunks that differ are
        decoded.

        saved: as `chunks` returned it; checkpoints of earlier versions have the JSON of the whole list.
        """
        chunks = [saved] if isinstance(saved, str) else saved
        own = self.chunks(entries)
        if chunks == own:
            return entries
        pairs = enumerate(zip(chunks, own, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(chunks), len(own)))
        entries = entries[: same * CHUNK] + [entry for chunk in chunks[same:] for entry in json.loads(chunk)]
        self._closed, self._open = self._closed[:same], []
        known = len(self._closed) * CHUNK
        self._last = entries[known - 1] if known else None
        return entries


def _joined(entries: list[str]) -> str:
    return f"[{', '.join(entries)}]"


class TrainerProgress:
    """Implements step_interface.Stateful for one trainer.

    Counters travel as JSON, in which the trainer itself writes them to its checkpoints.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._history = HistoryText()

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        counters = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in (*_OWN, _HISTORY)
        }
        return {
            "counters": json.dumps(counters),
            "history": self._history.chunks(trainer.state.log_history),
            "control": json.dumps(dataclasses.asdict(trainer.control)),
            "callbacks": json.dumps([callback.state()["attributes"] for callback in self._callbacks()]),
            "logged": [getattr(trainer, name) for name in _LOGGED],
            "sums": torch.stack([trainer._tr_loss, trainer._flops]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in json.loads(state["counters"]).items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = self._history.loaded(state["history"], trainer.state.log_history)
        for name, value in json.loads(state["control"]).items():
            setattr(trainer.control, name, value)
        for callback, attributes in zip(self._callbacks(), json.loads(state["callbacks"]), strict=True):
            for name, value in attributes.items():
                setattr(callback, name, value)
        for name, value in zip(_LOGGED, state["logged"], strict=True):
            setattr(trainer, name, value)
        trainer._tr_loss, trainer._flops = state["sums"].to(trainer.args.device).clone()

    def _callbacks(self) -> list[Any]:
        return [c for c in self._trainer.callback_handler.callbacks if isinstance(c, ExportableState)]
