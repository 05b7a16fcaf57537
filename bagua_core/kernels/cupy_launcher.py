"""How does a kernel start on a GPU? CuPy compiles cuda.cu when first needed and launches it on torch's stream.

Memory belongs to torch alone: kernels get its addresses, and CuPy allocates nothing.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.on_gpu import SOURCE, THREADS, compile_flags

KEPT_TABLES = 256  # of part addresses; a model's buckets come again in every step


class CupyLauncher:
    """See Launcher in on_gpu.py."""

    def __init__(self) -> None:
        """Raises KernelUnavailableError."""
        try:
            import cupy
        except ImportError as error:
            raise KernelUnavailableError(
                f"kernels on CUDA tensors need CuPy ({error}); install bagua[cuda12] or bagua[cuda13]"
            ) from error
        self._cupy = cupy
        self._module = functools.cache(self._compile)
        self._tables: OrderedDict[tuple[torch.device, tuple[int, ...]], Tensor] = OrderedDict()
        self.description = f"CuPy {cupy.__version__}"

    def _compile(self, device_index: int, passes: int) -> Any:
        return self._cupy.RawModule(code=SOURCE.read_text(), options=compile_flags(passes), backend="nvrtc")

    def launch(
        self, device: torch.device, name: str, passes: int, thread_blocks: int, arguments: Sequence[Any]
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        stream = torch.cuda.current_stream(index).cuda_stream
        with self._cupy.cuda.Device(index), self._cupy.cuda.ExternalStream(stream):
            kernel = self._module(index, passes).get_function(name)
            kernel((thread_blocks,), (THREADS,), tuple(arguments))

    def table(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        key = (device, tuple(numbers))
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key]
        table = torch.tensor(numbers, dtype=torch.int64).to(device)  # waits, so that every stream may read it
        self._tables[key] = table
        if len(self._tables) > KEPT_TABLES:
            _, oldest = self._tables.popitem(last=False)
            oldest.record_stream(torch.cuda.current_stream(device))
        return table
