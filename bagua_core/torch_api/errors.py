"""The exceptions of this surface; their messages name the alternative for a script."""

from __future__ import annotations


class NotLaunchedError(RuntimeError):
    """Several processes were started, but by something that this runtime knows nothing of."""


class LateWorkerError(RuntimeError):
    """The job was in the middle of a plain loop when this worker came in."""


class ModelsDifferError(ValueError):
    """Workers built different models, or wrapped them differently."""


class CommunicatorAborted(RuntimeError):
    """The script has called abort() on this communicator."""


class NoOptimizerError(RuntimeError):
    """Nothing says when a step of this model ends."""


class UnsupportedAlgorithmError(TypeError):
    """A script's own algorithm needs what only the core's interface offers."""


class NotOfferedError(ImportError):
    """A part of the original that does not exist here."""


def not_offered(what: str, instead: str) -> NotOfferedError:
    return NotOfferedError(f"{what} is not offered by bagua_core.torch_api: {instead}")
