"""Provides the attributes that the original gave every torch module: bagua_algorithm, bagua_buckets, bagua_optimizers
and bagua_module_name.

They are descriptors of nn.Module, so copies and pickles of a model come without what they tell. On a model that was not
wrapped they are None and raise nothing, and none is a `property`: torch.compile reads every attribute of a module, and
torch.jit.script compiles every property.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bagua_core.torch_api.bucket import BaguaBucket
from bagua_core.torch_api.wrapping import Wrapped, find_wrapped

_numbers = itertools.count()
_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


def install() -> None:
    """Adds the attributes to nn.Module. Doing it twice is harmless."""
    for name, tell in (
        ("bagua_algorithm", _algorithm),
        ("bagua_optimizers", _optimizers),
        ("bagua_buckets", _buckets),
    ):
        setattr(nn.Module, name, _Told(tell))
    nn.Module.bagua_module_name = _Name()  # type: ignore[attr-defined]


class _Told:
    """A descriptor that reads its value from a wrapped model's handle."""

    def __init__(self, tell: Callable[[Wrapped], Any]) -> None:
        self._tell = tell

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> Any:
        handle = None if model is None else find_wrapped(model)
        return None if handle is None else self._tell(handle)


class _Name:
    """A descriptor for a model's name. It is None before the model is wrapped, unless the script has set it."""

    def __get__(self, model: nn.Module | None, owner: type | None = None) -> str | None:
        if model is None:
            return None
        name = _names.get(model)
        if name is None and find_wrapped(model) is not None:
            name = _names[model] = f"{type(model).__name__}_{next(_numbers)}"
        return name

    def __set__(self, model: nn.Module, name: str) -> None:
        _names[model] = name


def _algorithm(handle: Wrapped) -> Any:
    """Returns the algorithm that the model was wrapped with; of an algorithm of the script's own, its AlgorithmImpl."""
    return handle.algorithm


def _optimizers(handle: Wrapped) -> list[torch.optim.Optimizer]:
    return list(handle.parallel.optimizers)


def _buckets(handle: Wrapped) -> list[BaguaBucket]:
    """Returns the buckets in the order in which they leave. Those of the runtime's algorithms only tell which
    parameters share a bucket."""
    return handle.buckets()
