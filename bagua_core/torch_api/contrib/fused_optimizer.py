"""Exports the core's fuse_optimizer under the original's name."""

from __future__ import annotations

from bagua_core.fused_optimizer import fuse_optimizer

__all__ = ["fuse_optimizer"]
