"""cuda.cu on the CPU: compiled as C++ beside cuda_emulation.cpp, started through the launches of on_gpu.py.

Finds wrong indices, barriers that not all threads reach and wrong arguments; not what only a GPU does.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua_core.kernels.on_gpu import SOURCE

EMULATION = Path(__file__).with_name("cuda_emulation.cpp")
COMPILE_TIMEOUT_S = 120


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compile_emulation(directory: Path, passes: int) -> Path:
    path = directory / f"emulated_gpu_{passes}.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    command = [
        compiler() or "c++",
        *flags,
        f"-DBAGUA_PASSES={passes}",
        f"-I{SOURCE.parent}",
        "-x",
        "c++",
        str(EMULATION),
        "-o",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return path


class EmulatedLauncher:
    """See Launcher in on_gpu.py. Compiles what is needed into `directory`, once."""

    def __init__(self, directory: Path) -> None:
        self._library = functools.cache(lambda passes: ctypes.CDLL(str(compile_emulation(directory, passes))))

    def launch(
        self, device: torch.device, name: str, passes: int, thread_blocks: int, arguments: Sequence[Any]
    ) -> None:
        assert device.type == "cpu"
        boxes = [ctypes.create_string_buffer(argument.tobytes()) for argument in arguments]
        array = (ctypes.c_void_p * len(boxes))(*[ctypes.addressof(box) for box in boxes])
        result = self._library(passes).emulate(name.encode(), ctypes.c_long(thread_blocks), array)
        assert result == 0, f"{name}: emulation returned {result}"

    def table(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64)
