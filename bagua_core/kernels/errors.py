"""The exceptions of kernel calls."""

from __future__ import annotations


class KernelArgumentError(ValueError):
    """A tensor or number does not fit; the message names the value and the next move."""


class KernelUnavailableError(RuntimeError):
    """This machine cannot run the kernel: no compiled kernels where some were demanded."""
