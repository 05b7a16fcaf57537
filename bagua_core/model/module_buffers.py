"""Lists the buffers of a module by name in every step, without walking the whole module each time."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NORMALIZATIONS = ("torch.nn.modules.batchnorm", "torch.nn.modules.instancenorm")


class ModuleBuffers:
    """Remembers which submodules hold buffers, not the buffers: a forward may put another tensor in their place.

    Submodules that are added later are seen after `refresh`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._holders: list[tuple[str, nn.Module]] = []
        self.refresh()

    def refresh(self) -> None:
        self._holders = [
            (f"{name}." if name else "", m) for name, m in self._module.named_modules() if m._buffers
        ]

    def current(self) -> list[torch.Tensor]:
        """Returns each buffer once, in registration order."""
        return list(self.named().values())

    def named(self, but_of: type[nn.Module] | None = None) -> dict[str, torch.Tensor]:
        """Returns each buffer once, under the first of its names. but_of: a class of submodules that are left out."""
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self._holders:
            if but_of is not None and isinstance(module, but_of):
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    found[prefix + name] = buffer
        return found

    def named_of_own_samples(self) -> dict[str, torch.Tensor]:
        """Returns the buffers of torch's own normalizations, which follow from the samples of this worker alone; see
        `named`."""
        own = {
            prefix + name
            for prefix, module in self._holders
            if type(module).__module__ in _NORMALIZATIONS  # a subclass may communicate
            for name in module._buffers
        }
        return {name: buffer for name, buffer in self.named().items() if name in own}

    def names_of_normalizations(self) -> set[str]:
        """Returns the names of the buffers of torch's normalizations and of classes that are derived from them."""
        holders = [(prefix, module) for prefix, module in self._holders if isinstance(module, _NormBase)]
        return {prefix + name for prefix, module in holders for name in module._buffers}

    def statistics(self) -> list[torch.Tensor]:
        """Returns running statistics of normalizations in training mode: autograd keeps them, but no backward uses
        them."""
        norms = [m for _, m in self._holders if isinstance(m, _NormBase) and m.training]
        return [b for m in norms for b in (m.running_mean, m.running_var) if b is not None]

    def put(self, name: str, buffer: torch.Tensor | None) -> None:
        """Makes `buffer` the one of that name; None removes it. Raises AttributeError for an unknown submodule."""
        path, _, own = name.rpartition(".")
        self._module.get_submodule(path)._buffers[own] = buffer
