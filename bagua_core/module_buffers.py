"""Which buffers does a module have right now? Asked every step, so without walking the whole module each time."""

from __future__ import annotations

import torch
from torch import nn


class ModuleBuffers:
    """Remembers which submodules hold buffers, not the buffers: a forward may put another tensor in their place.

    Submodules that are added later are seen after `refresh`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._holders: list[nn.Module] = []
        self.refresh()

    def refresh(self) -> None:
        self._holders = [m for m in self._module.modules() if m._buffers]

    def current(self) -> list[torch.Tensor]:
        """Each buffer once, in registration order."""
        if not self._holders:
            return []
        found = [b for m in self._holders for b in m._buffers.values() if b is not None]
        return list({id(b): b for b in found}.values())
