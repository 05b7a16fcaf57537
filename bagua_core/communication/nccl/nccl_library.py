"""Finds NCCL, and its names for torch's types. CuPy loads the library; nothing here needs a GPU.

CuPy is imported when NCCL is first asked for, so a machine without it loses nothing but NCCL.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bagua_contract.distribution import CUPY_HINT
from bagua_core.communication.communicator import ReduceOp
from bagua_core.communication.reducible import NATIVE
from bagua_core.errors import UserError

IN_PROGRESS = 7
"""The status of a communicator that does not block, while something is under way."""

_TYPES = {
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
    torch.int32: "NCCL_INT32",
    torch.int64: "NCCL_INT64",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.float32: "NCCL_FLOAT32",
    torch.float64: "NCCL_FLOAT64",
}
_OPERATIONS = {
    ReduceOp.SUM: "NCCL_SUM",
    ReduceOp.AVG: "NCCL_SUM",  # divided after the sum, alike for every transport
    ReduceOp.PRODUCT: "NCCL_PROD",
    ReduceOp.MIN: "NCCL_MIN",
    ReduceOp.MAX: "NCCL_MAX",
}
assert _TYPES.keys() == NATIVE


class NcclUnavailableError(UserError, RuntimeError):
    """CuPy or libnccl is not installed."""


class NcclHandle(Protocol):
    """The part of cupy.cuda.nccl.NcclCommunicator that is used. Buffers and streams are addresses."""

    def allReduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int
    ) -> None: ...
    def reduce(
        self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int
    ) -> None: ...
    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None: ...
    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None: ...
    def reduceScatter(
        self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int
    ) -> None: ...
    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None: ...
    def check_async_error(self) -> None: ...
    def abort(self) -> None: ...
    def destroy(self) -> None: ...


class Nccl:
    """A wrapper of cupy.cuda.nccl, or of its replacement in a test."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def type_of(self, dtype: torch.dtype) -> int:
        """Returns NCCL's number of a type. dtype: one of reducible.NATIVE."""
        return int(getattr(self.module, _TYPES[dtype]))

    def operation_of(self, op: ReduceOp) -> int | None:
        """Returns NCCL's number of an operation; None if NCCL has none of this kind."""
        name = _OPERATIONS.get(op)
        return None if name is None else int(getattr(self.module, name))

    def status_of(self, error: Exception) -> int | None:
        """Returns NCCL's number of an error; None if it is no error of NCCL: an error of CUDA or of torch, or no
        memory."""
        if isinstance(error, self.module.NcclError):
            return int(error.status)
        # CuPy 14 looks a status up in a table that ends before the newest ones
        if isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], int):
            return error.args[0]
        return None

    def grouped(self, act: Callable[[], None]) -> None:
        """Runs `act` as a group: all that it starts counts as one operation, so none of it waits for another."""
        self.module.groupStart()
        try:
            act()
        except BaseException:
            # What went wrong first is what matters
            with contextlib.suppress(self.module.NcclError, KeyError):
                self.module.groupEnd()
            raise
        self.module.groupEnd()


@functools.cache
def load() -> Nccl:
    """Returns CuPy's NCCL. Raises NcclUnavailableError if CuPy or libnccl is not installed."""
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise NcclUnavailableError(f"NCCL is used through CuPy ({error}); {CUPY_HINT}") from error
    if not nccl.available:
        raise NcclUnavailableError(
            "CuPy finds no libnccl.so.2; install nvidia-nccl-cu12 or nvidia-nccl-cu13, whichever is the CUDA of torch"
        )
    return Nccl(nccl)


def loaded_library() -> ctypes.CDLL | None:
    """Returns the very libnccl that CuPy calls, for what CuPy leaves out; None if it can't be determined.

    torch may have loaded another copy. CuPy's own module finds its functions in the one that it is linked with.
    """
    try:
        extension = importlib.import_module("cupy_backends.cuda.libs.nccl")
        library = ctypes.CDLL(str(extension.__file__))
    except (ImportError, OSError):
        return None
    return library if hasattr(library, "ncclGetVersion") else None
