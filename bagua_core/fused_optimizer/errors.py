"""The errors that fusing an optimizer can raise."""

from __future__ import annotations

from bagua_core.errors import UserError


class FusedOptimizerError(UserError, ValueError):
    """The optimizer cannot be fused as asked; the message says why and what to do instead."""


class PerParameterError(FusedOptimizerError):
    """The optimizer's step depends on where one parameter ends and the next begins, and strict=True was given."""
