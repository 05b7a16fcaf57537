"""Finds the modules that `fully_shard` was called on, and what they hold beside their sharded parameters.

Between a forward and the next backward, and after an evaluation, such a module may still hold gathered parameters,
which a later forward uses. They are copies: what changes the sharded ones, such as a heal, must not leave them behind.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from bagua_core.errors import UserError


class AccumulatedOverSteps(UserError, RuntimeError):
    """Raised if a committed step left gradients over that only torch's sharding knows of."""


_MODULE = "torch.distributed.fsdp"


def sharded_modules(module: nn.Module) -> list[Any]:
    """Returns the sharded ones of `module` and its submodules; none where torch's module for them is not loaded."""
    kind = getattr(sys.modules.get(_MODULE), "FSDPModule", None)
    return [] if kind is None else [m for m in module.modules() if isinstance(m, kind)]


def drop_gathered(modules: list[Any]) -> None:
    """Drops gathered parameters, between two steps; the modules' next forward gathers them anew."""
    for module in modules:
        module.reshard()


def _parameter_groups(module: Any) -> list[Any]:
    """Returns the groups of parameters whose gradients a sharded module reduces together."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    if found is None:  # a torch in which a module has one at most
        found = [state._fsdp_param_group]
    return [group for group in found if group is not None]


def workers_averaged(module: nn.Module) -> dict[str, int]:
    """Returns, by name, the number of workers over which torch's sharding averages a parameter's gradients. It lacks
    parameters that torch's sharding does not reduce, such as those that tensor parallelism alone has cut."""
    sizes = {
        id(_in_module(parameter)): group.mesh_info.mesh.size()
        for sharded in sharded_modules(module)
        for group in _parameter_groups(sharded)
        for parameter in group.fsdp_params
    }
    return {name: sizes[id(p)] for name, p in module.named_parameters() if id(p) in sizes}


def _in_module(parameter: Any) -> nn.Parameter:
    """Returns the parameter that the module has now: the script may have set another one after fully_shard, which
    torch's sharding takes over in the next forward."""
    place = parameter._module_info
    found: nn.Parameter = getattr(place.module, place.param_name)
    return found


def _unsynchronized(modules: list[Any]) -> Iterator[tuple[Any, str]]:
    """Yields where gradients of backwards with set_requires_gradient_sync(False) lie: objects, and the names of
    attributes."""
    for module in modules:
        for group in _parameter_groups(module):
            for parameter in group.fsdp_params:
                places = (
                    (parameter, "unsharded_accumulated_grad"),
                    (
                        getattr(parameter, "_unsharded_param", None),
                        "grad",
                    ),
                )
                yield from (place for place in places if getattr(*place, None) is not None)


def check_unsynchronized(modules: list[Any]) -> None:
    """Checks, when a step begins, that no gradients are left over. Raises AccumulatedOverSteps."""
    if next(_unsynchronized(modules), None) is not None:
        raise AccumulatedOverSteps(
            "gradients of an earlier step lie in the model, from a backward with set_requires_gradient_sync(False): "
            "they are in no .grad, so a failed step would lose them, and workers that join would not have them. "
            "Accumulate within one step (max_local_batch_size), or leave the synchronization on"
        )


def drop_unsynchronized(modules: list[Any]) -> None:
    """Drops the gradients that check_unsynchronized would find, for the step that they belong to did not happen."""
    for place in _unsynchronized(modules):
        setattr(*place, None)
