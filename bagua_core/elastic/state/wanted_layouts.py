"""Tells which tensors of a saved state this worker holds only a part of, and which part.

A tensor that is here already says it by itself. The state of an optimizer that has not stepped yet is sharded as its
parameter is, if it has the parameter's shape; a gradient is sharded as its parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain

from bagua_core.elastic.state import state_codec
from bagua_core.elastic.state.state_registry import StateRegistry
from bagua_core.model.sharded_tensors import Layout, is_sharded

_OPTIMIZER_STATE = re.compile(r"optimizers\.(\d+)\.state\.(\d+)\.")
_GRADIENT = "gradients."


def wanted_layouts(registry: StateRegistry) -> Callable[[str, tuple[int, ...]], Layout | None]:
    """Returns a function that gives a tensor's layout here, by the tensor's name in a checkpoint and its global shape.

    The function gives None if this worker has the tensor whole.
    """
    manifest, _ = state_codec.encode(registry.capture(), named=True)
    known = {
        d["name"]: Layout.from_json(d["sharded"])
        for d in state_codec.described_tensors(manifest)
        if "sharded" in d
    }
    parameters = [
        list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        for optimizer in registry.optimizers
    ]

    def wanted(name: str, shape: tuple[int, ...]) -> Layout | None:
        found = known.get(name)
        if found is None and name.startswith(_GRADIENT):
            found = known.get("modules." + name.removeprefix(_GRADIENT))
        match = _OPTIMIZER_STATE.match(name)
        if found is None and match is not None:
            optimizer, number = map(int, match.groups())
            if optimizer < len(parameters) and number < len(parameters[optimizer]):
                parameter = parameters[optimizer][number]
                found = Layout.of(parameter) if is_sharded(parameter) else None
        return found if found is not None and found.shape == shape else None

    return wanted
