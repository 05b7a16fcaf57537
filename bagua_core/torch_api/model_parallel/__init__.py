"""Provides mixtures of experts, under the original's names."""

from __future__ import annotations

from bagua_core.torch_api.model_parallel import moe

__all__ = ["moe"]
