"""The optimizer that steps on the blocks: of the same class and with the same attributes, but with other parameters.

Owns which attributes pass to the block optimizer and what of them comes back. The script's optimizer keeps its own
parameters, groups, states and hooks throughout, whatever happens in the step.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bagua_core.fused_optimizer.options import without_parameters

HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# step, and the others that may have been put on the instance, are bound to the script's optimizer
OF_THE_SCRIPT = frozenset(
    (
        *HOOKS,
        "param_groups",
        "state",
        "step",
        "fuse_step",
        "zero_grad",
        "register_step_pre_hook",
        "_opt_called",
    )
)


class BlockOptimizer:
    """Makes and holds a stand-in for the script's optimizer.

    optimizer: the block optimizer. options: by group, as it was given them.
    """

    def __init__(self, script: torch.optim.Optimizer) -> None:
        one: Any = object.__new__(type(script))
        given = {name: value for name, value in vars(script).items() if name not in OF_THE_SCRIPT}
        vars(one).update(given)
        for name in HOOKS:
            setattr(one, name, OrderedDict())
        # what some keep for all parameters together, under a name
        one.state = defaultdict(dict, {k: v for k, v in script.state.items() if not isinstance(k, Tensor)})
        self.optimizer: Any = one
        self.options: list[dict[str, Any]] = []
        one.param_groups = []
        for group in script.param_groups:
            options = without_parameters(group)
            self.options.append(options)
            one.param_groups.append({**options, "params": []})
        self._given = given

    def add(self, group: int, parameter: Tensor, state: dict[Any, Any] | None) -> None:
        self.optimizer.param_groups[group]["params"].append(parameter)
        if state is not None:
            self.optimizer.state[parameter] = state

    def names(self) -> tuple[list[Any], list[Any]]:
        """Returns the names of what the step keeps for all parameters together: begun before any parameter's state, and
        after."""
        keys = list(self.optimizer.state)
        first = next((place for place, key in enumerate(keys) if isinstance(key, Tensor)), len(keys))
        return keys[:first], [key for key in keys[first:] if not isinstance(key, Tensor)]

    def give_back_state(self, script: torch.optim.Optimizer, names: Iterable[Any]) -> bool:
        """Gives the script's optimizer what the step keeps under these names.

        Returns whether that put another object there.
        """
        own = self.optimizer.state
        wrote = False
        for name in names:
            if script.state.get(name, self) is not own[name]:
                script.state[name] = own[name]
                wrote = True
        return wrote

    def give_back(self, script: torch.optim.Optimizer) -> bool:
        """Gives the script's optimizer what the step wrote to options and attributes. Returns whether options were
        written."""
        wrote = False
        for group, given, own in zip(
            script.param_groups, self.options, self.optimizer.param_groups, strict=True
        ):
            for name, value in own.items():
                if name != "params" and given.get(name, self) is not value:
                    group[name] = value
                    wrote = True
        attributes = vars(script)
        for name, value in vars(self.optimizer).items():
            if name not in OF_THE_SCRIPT and self._given.get(name, self) is not value:
                attributes[name] = value
        return wrote


def plain_step(kind: type) -> Callable[..., Any]:
    """Returns the class's step without what torch's Optimizer puts around it.

    That calls hooks and switches gradients off.
    """
    step: Any = kind.step  # type: ignore[attr-defined]
    of_torch = sys.modules[
        torch.optim.Optimizer.__module__
    ].__file__  # methods may be patched by torch.compile
    while hasattr(step, "__wrapped__") and step.__code__.co_filename == of_torch:
        step = step.__wrapped__
    plain: Callable[..., Any] = step
    return plain
