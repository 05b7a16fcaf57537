"""Counts the GPUs that the kernel's driver lists."""

from __future__ import annotations

from pathlib import Path

_GPUS = Path("/proc/driver/nvidia/gpus")


def gpus_of_the_driver() -> int:
    """Returns the number of GPUs that the kernel's driver lists, whether they work or not. A container sees all GPUs of
    its host, even those it was not given."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
