"""Restores an optimizer's state with the data types it was captured in.

`Optimizer.load_state_dict` casts every floating-point value except `step` to the data type of its parameter. A float32
master weight of a bfloat16 parameter, or NAdam's `mu_product`, would come back rounded, and the layout of the state
would differ from that of the worker it was copied from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from bagua_core.errors import UserError


class OptimizerStateMismatch(UserError, RuntimeError):
    """An optimizer's own load_state_dict did not restore what it was given."""


def load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads `state_dict`, then puts every tensor back in the data type it has there.

    Tensors go to the device that load_state_dict chose for them. The optimizer may keep the tensors of `state_dict`, so
    they must own their memory.
    Raises OptimizerStateMismatch if the optimizer has other groups, or its state still differs in a data type or a
    shape.
    """
    _check_groups(optimizer, state_dict.get("param_groups"))
    optimizer.load_state_dict(state_dict)
    if "param_groups" in state_dict and isinstance(state_dict.get("state"), Mapping):
        _put_exact_values(optimizer, state_dict)
    _check(type(optimizer).__name__, state_dict, optimizer.state_dict())


def _check_groups(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    theirs, own = _group_sizes(saved), _group_sizes(optimizer.state_dict().get("param_groups"))
    if theirs is not None and own is not None and theirs != own:
        raise OptimizerStateMismatch(
            f"the job's {type(optimizer).__name__} has groups of {theirs} parameters, this one of {own}. Give an "
            "optimizer all of its groups when it is made, also of parameters that are frozen until later: a group that "
            "is added during the training is missing where a script starts from a checkpoint"
        )


def _group_sizes(groups: Any) -> list[int] | None:
    """Returns the number of parameters of each group.

    None if the groups are not of torch's form: the optimizer decides for itself then.
    """
    if not isinstance(groups, list) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        return None
    return [len(g["params"]) for g in groups]


def _put_exact_values(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_id, parameter in zip(saved_ids, parameters, strict=False):
        saved, loaded = state_dict["state"].get(saved_id), optimizer.state.get(parameter)
        if isinstance(saved, Mapping) and isinstance(loaded, dict):
            optimizer.state[parameter] = _exact(saved, loaded)


def _exact(saved: Any, loaded: Any) -> Any:
    """Returns `loaded`, with each tensor whose data type differs from the saved one replaced by that one."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if saved.dtype == loaded.dtype else saved.to(loaded.device)
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        return {key: _exact(saved[key], value) if key in saved else value for key, value in loaded.items()}
    if type(saved) in (list, tuple) and type(loaded) in (list, tuple) and len(saved) == len(loaded):
        return type(saved)(_exact(a, b) for a, b in zip(saved, loaded, strict=True))
    return loaded


def _check(name: str, expected: Any, found: Any) -> None:
    layouts = dict(_layouts(expected, "")), dict(_layouts(found, ""))
    for path, layout in layouts[0].items():
        if layouts[1].get(path, layout) != layout:
            raise OptimizerStateMismatch(
                f"{name}.load_state_dict changed {path} from {_shown(layout)} to {_shown(layouts[1][path])}; "
                "let it keep the data types and shapes of the state that it is given"
            )


def _layouts(value: Any, path: str) -> Iterator[tuple[str, tuple[torch.dtype, torch.Size]]]:
    if isinstance(value, torch.Tensor):
        yield path, (value.dtype, value.shape)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _layouts(item, f"{path}[{key!r}]")
    elif type(value) in (list, tuple):
        for place, item in enumerate(value):
            yield from _layouts(item, f"{path}[{place}]")


def _shown(layout: tuple[torch.dtype, torch.Size]) -> str:
    return f"{layout[0]} of shape {tuple(layout[1])}"
