"""The exceptions of kernel calls."""

from __future__ import annotations

from bagua_core.errors import UserError


class KernelArgumentError(UserError, ValueError):
    """A tensor or number does not fit; the message names the value and the next move."""


class KernelUnavailableError(UserError, RuntimeError):
    """This machine cannot run the kernel: no compiled kernels where some were demanded."""
