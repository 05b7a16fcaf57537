"""Makes an optimizer like the script's, with the same options, but for other parameters.

It is made by its constructor if its options say what that takes, so that what it prepares is prepared; else by its
attributes alone. In both ways it then has the attributes of the script's. One whose attributes lead to the script's
parameters (lists of its own, a further optimizer) is refused: it could be stepped on nothing else.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor

from bagua_core.errors import BaguaError
from bagua_core.fused_optimizer.block_optimizer import HOOKS, OF_THE_SCRIPT
from bagua_core.fused_optimizer.options import without_parameters


class HoldsParameters(BaguaError, ValueError):
    """An attribute of the optimizer leads to its parameters; the message names it."""


class _Watched(dict[int, Any]):
    """The memo of deepcopy: what it has copied so far. Notes when it comes to something that must not be copied."""

    def __init__(self, watched: dict[int, Any]) -> None:
        super().__init__(watched)
        self._watched = set(watched)
        self.came_by = False

    def get(self, key: int, default: Any = None) -> Any:
        self.came_by |= key in self._watched
        return super().get(key, default)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns deep copies of what the instance has beside parameters, groups, states and hooks.

    Raises HoldsParameters.
    """
    watched: dict[int, Any] = {
        id(thing): thing
        for thing in (optimizer, optimizer.param_groups, optimizer.state, *optimizer.param_groups)
    }
    for group in optimizer.param_groups:
        watched[id(group["params"])] = group["params"]
        watched.update({id(p): p for p in group["params"]})
    copied = {}
    for name, value in vars(optimizer).items():
        if name in OF_THE_SCRIPT:
            continue
        memo = _Watched(watched)
        try:
            copied[name] = copy.deepcopy(value, memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise HoldsParameters(f"its attribute {name!r} cannot be copied ({error})") from error
        if memo.came_by:
            raise HoldsParameters(f"its attribute {name!r} leads to its parameters")
    return copied


def like(
    optimizer: torch.optim.Optimizer,
    group: int,
    parameters: list[torch.nn.Parameter],
    attributes: dict[str, Any],
    *,
    constructed: bool,
) -> torch.optim.Optimizer:
    """Makes an optimizer for `parameters`, with the options of that group. attributes: of attributes_of.

    Raises whatever the class's constructor does.
    """
    options = copy.deepcopy(without_parameters(optimizer.param_groups[group]))
    one: Any
    if constructed:
        one = type(optimizer)(list(parameters), **_arguments(optimizer, options))
    else:
        one = object.__new__(type(optimizer))
        for name in HOOKS:
            setattr(one, name, OrderedDict())
        one.state = defaultdict(dict)
    vars(one).update(copy.deepcopy(attributes))
    one.param_groups = [{"params": list(parameters), **options}]
    return one  # type: ignore[no-any-return]


def _arguments(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the constructor's arguments, as far as the group's options, the defaults or an attribute of that name say
    them."""
    known = {**vars(optimizer), **optimizer.defaults, **options}
    taken = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]
    return {
        p.name: known[p.name]
        for p in taken
        if p.name in known and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }


def counts_of_steps(optimizer: torch.optim.Optimizer, taken: int, ahead: int) -> None:
    """Sets what says how many steps were taken, in states, groups and attributes, so far ahead."""
    for holder in (*optimizer.state.values(), *optimizer.param_groups, vars(optimizer)):
        if not isinstance(holder, dict):
            continue
        for name, value in list(holder.items()):
            if isinstance(value, Tensor):
                if value.dim() == 0 and value.numel() == 1 and value.item() == taken:
                    value.fill_(taken + ahead)
            elif type(value) in (int, float) and value == taken:
                holder[name] = type(value)(taken + ahead)
