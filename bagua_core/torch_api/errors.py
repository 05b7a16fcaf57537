"""The exceptions of this surface; their messages name the alternative for a script."""

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
    "not_offered",
]


class NotLaunchedError(UserError, RuntimeError):
    """Several processes were started, but by something that this runtime knows nothing of."""


class ModelsDifferError(UserError, ValueError):
    """Workers built different models, or wrapped them differently."""


class CommunicatorAborted(UserError, RuntimeError):
    """The script has called abort() on this communicator."""


class NoOptimizerError(UserError, RuntimeError):
    """Nothing says when a step of this model ends."""


class UnsupportedAlgorithmError(UserError, TypeError):
    """A script's own algorithm needs what only the core's interface offers."""


class NotOfferedError(UserError, ImportError):
    """A part of the original that does not exist here."""


def not_offered(what: str, instead: str) -> NotOfferedError:
    return NotOfferedError(f"{what} is not offered by bagua_core.torch_api: {instead}")
