"""NVRTC without CUDA, CuPy or a GPU: the library of the nvidia-cuda-nvrtc wheel, by ctypes."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from bagua_core.kernels.on_gpu import SOURCE, compile_flags


def library_path() -> Path | None:
    """None if no wheel brought it."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(p for folder in folders for p in folder.glob("*/lib/libnvrtc.so.*") if "alt" not in p.name)
    return found[-1] if found else None


class Nvrtc:
    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def ptx(self, architecture: str, passes: int) -> str:
        """cuda.cu as PTX for e.g. "compute_80"; an "sm_80" also runs the assembler, and gives its PTX too.

        Raises AssertionError with the compiler's log.
        """
        program = ctypes.c_void_p()
        source = SOURCE.read_text().encode()
        made = self._library.nvrtcCreateProgram(ctypes.byref(program), source, b"cuda.cu", 0, None, None)
        assert made == 0, f"nvrtcCreateProgram returned {made}"
        try:
            options = [
                option.encode() for option in (f"--gpu-architecture={architecture}", *compile_flags(passes))
            ]
            array = (ctypes.c_char_p * len(options))(*options)
            result = self._library.nvrtcCompileProgram(program, len(options), array)
            assert result == 0, f"{architecture}: {self._text(program, 'ProgramLog')}"
            if architecture.startswith("sm_"):
                size = ctypes.c_size_t()
                assert self._library.nvrtcGetCUBINSize(program, ctypes.byref(size)) == 0
                assert size.value > 0, f"{architecture}: no machine code"
            return self._text(program, "PTX")
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(program, buffer) == 0
        return buffer.value.decode()
