"""Starts kernels on a GPU: NVRTC compiles cuda.cu when first needed, and CuPy launches it on torch's current stream.

Memory belongs to torch alone: kernels get its addresses, and CuPy allocates nothing. The thread's device is set by
torch: CuPy's `Device` selects the device before it again on leaving, which from CUDA 12 on makes a context there.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua_contract.distribution import CUPY_HINT
from bagua_core.kernels.compiled_cache import (
    LibraryUnavailableError,
    cache_directory,
    check_private,
    compile_once,
    content,
)
from bagua_core.kernels.errors import KernelUnavailableError
from bagua_core.kernels.on_gpu import HEADER, SOURCE, THREADS, compile_flags

_log = logging.getLogger("bagua.kernels")

WAIT_S = 60.0
"""The longest wait for kernels that another process compiles; then this one compiles them for itself."""
KEPT_TABLES = 256  # of part addresses; a model's buckets come again in every step


class CupyLauncher:
    """Starts kernels by CuPy; see Launcher in on_gpu.py."""

    def __init__(self) -> None:
        """Imports CuPy. Raises KernelUnavailableError if it is not installed."""
        try:
            import cupy
        except ImportError as error:
            raise KernelUnavailableError(
                f"kernels on CUDA tensors need CuPy ({error}); {CUPY_HINT}"
            ) from error
        self._cupy = cupy
        self._module = functools.cache(self._compile)
        self._streams: dict[tuple[int, int], Any] = {}  # CuPy's objects for torch's streams
        self._tables: OrderedDict[tuple[torch.device, tuple[int, ...]], Tensor] = OrderedDict()
        self.description = f"CuPy {cupy.__version__}"

    def _compile(self, device_index: int, passes: int) -> Any:
        module = self._cupy.cuda.Module()
        module.load(self._machine_code(torch.cuda.get_device_capability(device_index), passes))
        return module

    def _machine_code(self, capability: tuple[int, int], passes: int) -> bytes:
        """Returns the kernels for the current device, compiled (seconds) unless the user's cache has them.

        Not by CuPy's RawModule: behind all other options it gives NVRTC -ftz=true, which reads denormals as 0, and its
        own cache does not notice a changed header (CuPy 14.2, cupy/cuda/compiler.py).
        """
        versions = f"{self._cupy.__version__} {self._cupy.cuda.nvrtc.getVersion()} {capability}"
        digest = hashlib.sha256(" ".join([versions, *compile_flags(passes)]).encode())
        for source in (SOURCE, HEADER):
            digest.update(source.read_bytes())
        path = cache_directory() / f"cuda-{digest.hexdigest()[:16]}.bin"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(path.parent)
            compile_once(path, lambda fresh: fresh.write_bytes(self._compiled(passes)), WAIT_S)
            code = content(path)
            return self._compiled(passes) if code is None else code
        except (LibraryUnavailableError, OSError) as error:
            _log.warning(
                "the CUDA kernels are compiled anew by each worker, for they can't be kept: %s", error
            )
            return self._compiled(passes)

    def _compiled(self, passes: int) -> bytes:
        code, _ = self._cupy.cuda.compiler.compile_using_nvrtc(SOURCE.read_text(), compile_flags(passes))
        return bytes(code)

    def launch(
        self, device: torch.device, name: str, passes: int, thread_blocks: int, arguments: Sequence[Any]
    ) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        with torch.cuda.device(index), self._on(torch.cuda.current_stream(index), index):
            kernel = self._module(index, passes).get_function(name)
            kernel((thread_blocks,), (THREADS,), tuple(arguments))

    def _on(self, stream: Any, index: int) -> Any:
        """Returns CuPy's object for a stream of torch's, which never destroys one."""
        key = (index, int(stream.cuda_stream))
        found = self._streams.get(key)
        if found is None:
            kind = self._cupy.cuda.Stream
            if hasattr(kind, "from_external") and hasattr(stream, "__cuda_stream__"):
                found = kind.from_external(stream)
            else:  # CuPy before 14, where ExternalStream is not deprecated yet, or an older torch
                found = self._cupy.cuda.ExternalStream(key[1], index)
            self._streams[key] = found
        return found

    def table(self, numbers: Sequence[int], device: torch.device) -> Tensor:
        key = (device, tuple(numbers))
        table = self._tables.get(key)
        if table is None:
            # Waits, so that every stream may read it
            table = torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)
            self._tables[key] = table
            if len(self._tables) > KEPT_TABLES:
                self._tables.popitem(last=False)
        else:
            self._tables.move_to_end(key)
        # for the day on which it is let go, while a kernel may still read it
        table.record_stream(torch.cuda.current_stream(device))
        return table
