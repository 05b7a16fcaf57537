"""Joins a NCCL communicator, in bounded time.

CuPy's constructor blocks, with nothing in hand that could be given up. So the library itself makes the handle, in its
form that does not block, and a CuPy object gets it and owns it from then on. Where that can't be done (a CuPy of
another layout, an old NCCL) CuPy's constructor is called, and the caller must be ready to leave the thread behind.
Either way no rank begins before all ranks are known to be there.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed
from bagua_core.communication.nccl import nccl_end
from bagua_core.communication.nccl.nccl_library import IN_PROGRESS, Nccl, NcclHandle

UNIQUE_ID_BYTES = 128
_LOOK_S = 0.001
_MAGIC = 0xCAFEBEEF
_FIRST_VERSION = 21400  # that has communicators which do not block, and the layout below


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    """The ncclConfig_t of its first version; newer libraries take their defaults for what they have added since."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def share_unique_id(nccl: Nccl, store: Store, name: str, global_rank: int, world_size: int) -> bytes:
    """Returns the id that rank 0 makes, once all ranks have asked for it. Raises CollectiveFailed in the store's own
    time."""
    try:
        if global_rank == 0:
            # Rank 0 alone counts the others, and no rank joins before it has: each of the others asks once.
            store.wait([f"nccl/{name}/here/{r}" for r in range(1, world_size)])
            store.set(f"nccl/{name}/id", bytes(nccl.module.get_unique_id()).hex())
        else:
            store.set(f"nccl/{name}/here/{global_rank}", "here")
        return bytes.fromhex(bytes(store.get(f"nccl/{name}/id")).decode())
    except RuntimeError as error:
        raise CollectiveFailed(f"meeting for NCCL: {error}") from error


def join(
    nccl: Nccl,
    library: ctypes.CDLL | None,
    unique_id: bytes,
    world_size: int,
    global_rank: int,
    timeout_s: float,
    abort_flag: AbortFlag,
) -> NcclHandle:
    """Joins the communicator on the current CUDA device. library: see nccl_library.loaded_library.

    Raises CollectiveFailed, after timeout_s at the latest where the library can be given up; CollectiveAborted.
    """
    if library is not None and can_be_given_up(nccl, library):
        handle = _join_without_blocking(
            library, unique_id, world_size, global_rank, time.monotonic() + timeout_s, abort_flag
        )
        return _adopt(nccl, handle)
    try:
        return nccl.module.NcclCommunicator(world_size, unique_id, global_rank)  # type: ignore[no-any-return]
    except nccl.module.NcclError as error:
        raise CollectiveFailed(f"joining NCCL: {error}") from error


def can_be_given_up(nccl: Nccl, library: ctypes.CDLL | None) -> bool:
    """Tells whether `join` ends in its time here, and at once when the generation is given up."""
    return library is not None and _has_other_form(library) and _can_adopt(nccl)


# -- the form that does not block


def _has_other_form(library: ctypes.CDLL) -> bool:
    version = ctypes.c_int()
    return library.ncclGetVersion(ctypes.byref(version)) == 0 and version.value >= _FIRST_VERSION


def _join_without_blocking(
    library: ctypes.CDLL,
    unique_id: bytes,
    world_size: int,
    global_rank: int,
    deadline_s: float,
    abort_flag: AbortFlag,
) -> int:
    """Returns the address of a communicator that is ready."""
    communicator = ctypes.c_void_p()
    config = _Config(ctypes.sizeof(_Config), _MAGIC, _FIRST_VERSION, 0)
    status = library.ncclCommInitRankConfig(
        ctypes.byref(communicator),
        ctypes.c_int(world_size),
        _UniqueId.from_buffer_copy(unique_id),
        ctypes.c_int(global_rank),
        ctypes.byref(config),
    )
    while status == IN_PROGRESS:
        reason = abort_flag.reason
        if reason is not None or time.monotonic() >= deadline_s:
            _drop(library, communicator)
            if reason is not None:
                raise CollectiveAborted(reason)
            raise CollectiveFailed(
                f"joining NCCL: not all of {world_size} ranks came together in time; NCCL_DEBUG=INFO says more, "
                "BAGUA_TRANSPORT=gloo does without NCCL"
            )
        time.sleep(_LOOK_S)
        state = ctypes.c_int()
        status = library.ncclCommGetAsyncError(communicator, ctypes.byref(state)) or state.value
    if status != 0:
        _drop(library, communicator)
        library.ncclGetErrorString.restype = ctypes.c_char_p
        text = library.ncclGetErrorString(ctypes.c_int(status)) or b"unknown"
        raise CollectiveFailed(
            f"joining NCCL: {text.decode(errors='replace')}; NCCL_DEBUG=WARN says more, "
            "BAGUA_TRANSPORT=gloo does without NCCL"
        )
    assert communicator.value is not None
    return communicator.value


def _drop(library: ctypes.CDLL, communicator: ctypes.c_void_p) -> None:
    if communicator.value is not None:
        nccl_end.bounded(lambda: library.ncclCommAbort(communicator))


# -- a CuPy object for it


def _slot(handle: Any) -> ctypes.c_void_p:
    """Returns the field in which a CuPy communicator keeps its address: the last of its fields."""
    return ctypes.c_void_p.from_address(
        id(handle) + type(handle).__basicsize__ - ctypes.sizeof(ctypes.c_void_p)
    )


def _can_adopt(nccl: Nccl) -> bool:
    """Tells whether CuPy reads what is written to `_slot`. It tries this with an address that nothing uses."""
    kind: Any = nccl.module.NcclCommunicator
    if not isinstance(kind, type) or kind.__basicsize__ <= object.__basicsize__:
        return False
    empty = _empty(nccl)
    slot = _slot(empty)
    if getattr(empty, "comm", None) != 0 or slot.value is not None:
        return False
    slot.value = 1
    read = empty.comm
    slot.value = None
    return bool(read == 1)


def _adopt(nccl: Nccl, address: int) -> NcclHandle:
    handle = _empty(nccl)
    _slot(handle).value = address
    return handle  # type: ignore[no-any-return]


def _empty(nccl: Nccl) -> Any:
    kind = nccl.module.NcclCommunicator
    return kind.__new__(kind)
