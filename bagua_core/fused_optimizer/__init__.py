"""Makes any torch optimizer step on few blocks instead of many parameters. A script uses it as
bagua_core.fuse_optimizer."""

from __future__ import annotations

from bagua_core.fused_optimizer.errors import FusedOptimizerError, PerParameterError
from bagua_core.fused_optimizer.fuse import fuse_optimizer, is_fused

__all__ = ["FusedOptimizerError", "PerParameterError", "fuse_optimizer", "is_fused"]
