"""Defines the exceptions of this surface; their messages name the alternative for a script."""

from __future__ import annotations

from bagua_core.errors import LateWorkerError, UserError

__all__ = [
    "CommunicatorAborted",
    "LateWorkerError",
    "ModelsDifferError",
    "NoOptimizerError",
    "NotLaunchedError",
    "NotOfferedError",
    "UnsupportedAlgorithmError",
]


class NotLaunchedError(UserError, RuntimeError):
    """Raised if several processes were started by a launcher that this runtime does not know."""


class ModelsDifferError(UserError, ValueError):
    """Raised if workers built different models, or wrapped them differently."""


class CommunicatorAborted(UserError, RuntimeError):
    """Raised by a communicator on which the script has called abort()."""


class NoOptimizerError(UserError, RuntimeError):
    """Raised if nothing says when a step of the model ends, because no optimizer of it is known."""


class UnsupportedAlgorithmError(UserError, TypeError):
    """Raised if a script's own algorithm needs what only the core's interface offers."""


class NotOfferedError(UserError, ImportError):
    """Raised for a part of the original that does not exist here."""


def not_offered(what: str, instead: str) -> NotOfferedError:
    """Returns the error for the name `what`. instead: the alternative for a script."""
    return NotOfferedError(f"{what} is not offered by bagua_core.torch_api: {instead}")
