"""Defines the exceptions of fuse_optimizer."""

from __future__ import annotations

from bagua_core.errors import UserError


class FusedOptimizerError(UserError, ValueError):
    """Raised if the optimizer cannot be fused as asked; the message has the reason and an alternative."""


class PerParameterError(FusedOptimizerError):
    """Raised with strict=True if the optimizer's step depends on the boundaries between parameters."""
