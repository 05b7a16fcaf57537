"""Where do scripts written for the original's later versions find fuse_optimizer? It is the core's own."""

from __future__ import annotations

from bagua_core.fused_optimizer import fuse_optimizer

__all__ = ["fuse_optimizer"]
