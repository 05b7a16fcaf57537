"""Exports BaguaModule: any torch module, since every one has with_bagua."""

from __future__ import annotations

from torch.nn import Module as BaguaModule

__all__ = ["BaguaModule"]
