"""Makes the state object of a communication hook a part of the job's state: rolled back, copied, checkpointed.

A step works on a copy of the object, which becomes the object's content once the step is final. A hook of a failed step
may go on with its copy unseen, and so may collectives that were given up.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bagua_contract.environment import variable
from bagua_core.errors import UserError

_GROUP = "process_group"
_WORKER = variable("worker_id")


class HookStateError(UserError, TypeError):
    """A hook's state has a field that the job can't keep."""


class HookState:
    """Makes a registered state (state_dict, load_state_dict) of the fields of the hook's own object."""

    def __init__(self, state: Any, local: tuple[str, ...]) -> None:
        """Takes the hook's object. Raises HookStateError for an object without fields."""
        if not _names(state):
            raise HookStateError(f"a hook's state is an object with fields, not {type(state).__name__}")
        self._state = state
        self._of_step: Any = None  # the copy that the step under way works on
        plain = {n: v for n, v in self._fields().items() if isinstance(v, bool | int | float | str)}
        self._settings = ", ".join(f"{name}={plain[name]!r}" for name in sorted(plain))
        self._first = {name: _copied(value) for name, value in self._fields().items() if name in local}

    @property
    def described(self) -> str:
        """The settings with which the hook's object was made."""
        return self._settings

    def of_step(self) -> Any:
        """Returns the copy of the object for the step under way."""
        if self._of_step is None:
            self._of_step = object.__new__(type(self._state))  # copy.copy asks some for torch's default group
            _set(self._of_step, _copied(self._fields()))
        return self._of_step

    def reduced(self) -> None:
        """Takes over what the step changed: the step is final."""
        of_step, self._of_step = self._of_step, None
        if of_step is not None:
            _set(self._state, {name: getattr(of_step, name) for name in _names(of_step) if name != _GROUP})

    def failed(self) -> None:
        """Drops what the step changed: the step did not happen."""
        self._of_step = None

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self._state, name) for name in _names(self._state) if name != _GROUP}

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields for a copy or a checkpoint. Raises HookStateError for a field that can't be kept."""
        fields = {name: _kept(value, name) for name, value in self._fields().items()}
        return {"worker": os.environ.get(_WORKER, ""), "fields": fields}

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        is_own = kept["worker"] == os.environ.get(_WORKER, "")
        for name, value in kept["fields"].items():
            present = getattr(self._state, name, None)
            if name in self._first and not is_own:
                setattr(self._state, name, _copied(self._first[name]))
            elif isinstance(present, np.random.RandomState):
                present.set_state(value)
            else:
                setattr(self._state, name, _copied(value))


def _names(state: Any) -> list[str]:
    """Returns the names of the object's fields, in its dictionary or in slots."""
    slots = [name for kind in type(state).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(state, "__dict__", {})]
    return [name for name in names if not name.startswith("__") and hasattr(state, name)]


def _set(state: Any, fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        setattr(state, name, value)


def _kept(value: Any, name: str, *, is_field: bool = True) -> Any:
    if isinstance(value, np.random.RandomState) and is_field:
        return value.get_state(legacy=False)
    if isinstance(value, dict):
        return {key: _kept(each, name, is_field=False) for key, each in value.items()}
    if isinstance(value, list | tuple):
        kept = [_kept(each, name, is_field=False) for each in value]
        return type(value)(kept) if type(value) in (list, tuple) else value
    if value is None or isinstance(value, bool | int | float | str | torch.Tensor | np.ndarray):
        return value
    raise HookStateError(
        f"field {name!r} of a hook's state holds a {type(value).__name__}, which the job can't keep; use numbers, "
        "strings, tensors, containers of them, or numpy's RandomState as a field of its own"
    )


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return copy.deepcopy(value)
