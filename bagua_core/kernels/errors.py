"""Defines the exceptions of kernel calls."""

from __future__ import annotations

from bagua_core.errors import UserError


class KernelArgumentError(UserError, ValueError):
    """Raised if a tensor or number does not fit; the message names the value and the next move."""


class KernelUnavailableError(UserError, RuntimeError):
    """Raised if this machine cannot run the kernel: it has no compiled kernels where some were demanded."""
