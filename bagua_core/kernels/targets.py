"""Chooses the target that runs a kernel for a tensor; once per process and device type, by availability.

`BAGUA_KERNELS` decides: "auto" (the default), "extension" (an error where there are no compiled kernels: no library for
the CPU, no CuPy for a GPU) or "fallback".
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from bagua_core.kernels import cpu_library
from bagua_core.kernels.compiled_cache import LibraryUnavailableError
from bagua_core.kernels.errors import KernelArgumentError, KernelUnavailableError
from bagua_core.kernels.fallback import FallbackKernels
from bagua_core.kernels.interface import Kernels
from bagua_core.kernels.on_cpu import CpuKernels

CHOICE_VARIABLE = "BAGUA_KERNELS"
CHOICES = ("auto", "extension", "fallback")

_log = logging.getLogger("bagua.kernels")


@dataclass(frozen=True, slots=True)
class Target:
    """The target that runs kernels. name: "extension", "fallback" or "cuda". reason: where it comes from, or what is
    missing."""

    name: str
    reason: str


def target(device: str | torch.device = "cpu") -> Target:
    """Returns the target for tensors on `device`. Raises KernelUnavailableError, KernelArgumentError."""
    return _chosen_for(torch.device(device))[0]


def kernels_for(tensor: Tensor) -> Kernels:
    """Returns the kernels for `tensor`. Raises KernelUnavailableError, KernelArgumentError."""
    return _chosen_for(tensor.device)[1]


@functools.cache
def compiled_library() -> ctypes.CDLL:
    """Returns the CPU's library, for what goes on without it just as well: nothing is logged where there is none.
    Raises KernelUnavailableError."""
    if os.environ.get(CHOICE_VARIABLE) == "fallback":
        raise KernelUnavailableError(f"{CHOICE_VARIABLE}=fallback")
    try:
        return cpu_library.find().library
    except LibraryUnavailableError as error:
        raise KernelUnavailableError(str(error)) from error


def _chosen_for(device: torch.device) -> tuple[Target, Kernels]:
    choice = os.environ.get(CHOICE_VARIABLE, "auto")
    if choice not in CHOICES:
        raise KernelArgumentError(f"{CHOICE_VARIABLE}={choice}; use one of {', '.join(CHOICES)}")
    if device.type == "cpu":
        return _cpu(choice)
    if device.type == "cuda":
        return _cuda(choice)
    raise KernelArgumentError(f"a tensor on {device}; kernels run on cpu and cuda tensors")


@functools.cache
def _cpu(choice: str) -> tuple[Target, Kernels]:
    if choice == "fallback":
        return Target("fallback", f"{CHOICE_VARIABLE}=fallback"), FallbackKernels()
    try:
        found = cpu_library.find()
    except LibraryUnavailableError as error:
        if choice == "extension":
            raise KernelUnavailableError(f"{CHOICE_VARIABLE}=extension, but {error}") from error
        _log.warning(
            "compression on the CPU runs by torch's operators, many times slower than the compiled kernels: %s. "
            "Install a C compiler and run `python -m bagua_core.kernels.build`",
            error,
        )
        return Target("fallback", str(error)), FallbackKernels()
    return Target("extension", found.where), CpuKernels(found.library)


@functools.cache
def _cuda(choice: str) -> tuple[Target, Kernels]:
    from bagua_core.kernels.cupy_launcher import CupyLauncher
    from bagua_core.kernels.on_gpu import GpuKernels

    try:
        launcher = CupyLauncher()
    except KernelUnavailableError as error:
        if choice == "extension":
            raise
        _log.warning("compression on GPUs runs by torch's operators, slower than the CUDA kernels: %s", error)
        return Target("fallback", str(error)), FallbackKernels()
    return Target("cuda", launcher.description), GpuKernels(launcher)
