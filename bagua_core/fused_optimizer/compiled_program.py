"""How does torch.compile make a program of a recording? For compile=True."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bagua_core.fused_optimizer.errors import NoCompilerError
from bagua_core.fused_optimizer.recording import NotRecordable, Recording, as_graph


def require_compiler(device: torch.device) -> None:
    """Raises NoCompilerError where torch.compile could not build code for `device`. It takes $CXX, else g++."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if device.type == "cpu" and shutil.which(words[0]) is None:
        raise NoCompilerError(
            f"compile=True needs a C++ compiler for parameters on the CPU, and there is no {words[0]} on PATH; "
            "install g++, set CXX, or leave compile=True out"
        )


class CompiledProgram:
    """Equal to the step within rounding. Raises NotRecordable where the compiler fails."""

    def __init__(self, recording: Recording, inputs: Callable[[], list[Tensor]]) -> None:
        """inputs: copies of the first ones it is to run on. It runs on them at once, for that is when it is compiled: a
        compiler that is broken is found while the step can still go on without it."""
        self._call = torch.compile(as_graph(recording).forward, dynamic=True, fullgraph=True)
        try:
            self.run(recording, [inputs()])
        except Exception as error:  # whatever torch wraps a compiler's troubles in
            raise NotRecordable(f"torch.compile fails on it: {_first_line(error)}") from error

    def run(self, recording: Recording, parts: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """See recorded_pass.Program."""
        numbers = _as_tensor([*recording.numbers, 1.0], parts[0][0])
        return [list(self._call(*inputs, numbers, *recording.shared)) for inputs in parts]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _as_tensor(numbers: Sequence[float], like: Tensor) -> Tensor:
    """In the precision in which torch applies a number to elements of that dtype."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.tensor(numbers, dtype=dtype).to(like.device, non_blocking=True)
