"""Joining NCCL is bounded and can be given up; by a stub of its library, and by the real one's CuPy if it is here."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bagua_core.communication.communicator import AbortFlag, CollectiveAborted, CollectiveFailed
from bagua_core.communication.nccl import nccl_end, nccl_join, nccl_library
from bagua_core.communication.nccl.nccl_library import IN_PROGRESS, Nccl, NcclUnavailableError
from tests.core.communication.emulated_nccl import NcclError
from tests.core.communication.worlds import run_ranks

SOURCE = Path(__file__).parents[1] / "stub_nccl.c"
ID = bytes(range(128))


class Adoptable(ctypes.Structure):
    """As CuPy's communicator: its last field is an address that it reads as `comm`. (ctypes keeps a structure of two
    addresses in the object itself, at its end.)"""

    __slots__ = ()
    _fields_ = (("other", ctypes.c_void_p), ("address", ctypes.c_void_p))

    @property
    def comm(self) -> int:
        return self.address or 0


class Blocking:
    """A communicator of another layout, whose constructor does it all."""

    def __init__(self, world_size: int, unique_id: bytes, rank: int) -> None:
        self.made_with = (world_size, unique_id, rank)
        self.comm = 5
        if rank == 9:
            raise NcclError(6)


def module_with(kind: type) -> Nccl:
    return Nccl(SimpleNamespace(NcclCommunicator=kind, NcclError=NcclError, get_unique_id=lambda: ID))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stub") / "libstub.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(SOURCE)], check=True)
    return path


@pytest.fixture
def library(compiled: Path, tmp_path: Path) -> Iterator[ctypes.CDLL]:
    own = tmp_path / "libstub.so"  # with its variables as they are at first
    own.write_bytes(compiled.read_bytes())
    yield ctypes.CDLL(str(own))


def set_to(library: ctypes.CDLL, **values: int) -> None:
    for name, value in values.items():
        ctypes.c_int.in_dll(library, f"stub_{name}").value = value


def read(library: ctypes.CDLL, name: str, kind: Any = ctypes.c_int) -> Any:
    return kind.in_dll(library, f"stub_{name}").value


def address_of(library: ctypes.CDLL) -> int:
    library.stub_communicator.restype = ctypes.c_void_p
    found: int = library.stub_communicator()
    return found


@pytest.mark.parametrize("looks", [0, 3])
def test_a_handle_that_did_not_block_ends_in_a_cupy_object(library: ctypes.CDLL, looks: int) -> None:
    set_to(library, looks=looks)
    handle: Any = nccl_join.join(module_with(Adoptable), library, ID, 4, 2, 5.0, AbortFlag())
    assert isinstance(handle, Adoptable) and handle.comm == address_of(library)
    assert (read(library, "world_size"), read(library, "rank"), read(library, "blocking")) == (4, 2, 0)
    assert read(library, "magic", ctypes.c_uint) == 0xCAFEBEEF
    assert read(library, "config_version", ctypes.c_uint) == 21400
    assert read(library, "config_size", ctypes.c_size_t) == 24
    assert bytes((ctypes.c_char * 128).in_dll(library, "stub_id")) == ID
    assert read(library, "aborted") == 0


def test_peers_that_do_not_come_are_given_up_in_time(library: ctypes.CDLL) -> None:
    set_to(library, looks=-1)
    began_s = time.monotonic()
    with pytest.raises(CollectiveFailed, match="not all of 2 ranks") as caught:
        nccl_join.join(module_with(Adoptable), library, ID, 2, 0, 0.1, AbortFlag())
    assert not isinstance(caught.value, CollectiveAborted)
    assert 0.1 <= time.monotonic() - began_s < 1.0
    assert read(library, "aborted") == 1


def test_a_generation_given_up_ends_it(library: ctypes.CDLL) -> None:
    set_to(library, looks=-1)
    flag = AbortFlag()
    setting = threading.Timer(0.05, lambda: flag.set("superseded"))
    setting.start()
    with pytest.raises(CollectiveAborted, match="superseded"):
        nccl_join.join(module_with(Adoptable), library, ID, 2, 0, 20.0, flag)
    setting.join()
    assert read(library, "aborted") == 1


@pytest.mark.parametrize("looks", [0, 2])
def test_an_error_is_told_in_nccls_words(library: ctypes.CDLL, looks: int) -> None:
    set_to(library, looks=looks, status=6)
    with pytest.raises(CollectiveFailed, match="joining NCCL: remote process exited"):
        nccl_join.join(module_with(Adoptable), library, ID, 2, 0, 5.0, AbortFlag())
    assert read(library, "aborted") == 1


@pytest.mark.parametrize("why", ["no library", "an old library", "another CuPy"])
def test_where_that_cannot_be_cupys_constructor_it_is(library: ctypes.CDLL, why: str) -> None:
    kind = Blocking
    if why == "an old library":
        set_to(library, version=21304)
    given = None if why == "no library" else library
    handle: Any = nccl_join.join(module_with(kind), given, ID, 2, 1, 5.0, AbortFlag())
    assert handle.made_with == (2, ID, 1) and handle.comm == 5
    with pytest.raises(CollectiveFailed, match="joining NCCL: NCCL status 6"):
        nccl_join.join(module_with(kind), given, ID, 10, 9, 5.0, AbortFlag())


def test_all_ranks_get_the_id_of_rank_0_and_nobody_before_all_are_there() -> None:
    store = HashStore()
    nccl = module_with(Blocking)
    ids = run_ranks(range(3), lambda r: nccl_join.share_unique_id(nccl, store, "collectives", r, 3))
    assert ids == [ID] * 3
    lonely = HashStore()
    lonely.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(CollectiveFailed, match="meeting for NCCL"):
        nccl_join.share_unique_id(nccl, lonely, "collectives", 0, 2)


# -- the real CuPy, which needs no GPU for this


def real() -> Nccl:
    try:
        return nccl_library.load()
    except NcclUnavailableError as error:
        pytest.skip(str(error))


def test_this_cupy_can_be_given_a_handle() -> None:
    assert nccl_join._can_adopt(real())


def test_this_libnccl_has_the_form_that_does_not_block() -> None:
    nccl = real()
    library = nccl_library.loaded_library()
    assert library is not None and nccl_join._has_other_form(library)
    version = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(version))
    assert version.value == nccl.module.get_version(), "CuPy's own library, not another one"
    assert len(nccl.module.get_unique_id()) == nccl_join.UNIQUE_ID_BYTES


def test_without_a_gpu_joining_fails_at_once_in_nccls_words() -> None:
    nccl = real()
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    unique_id = bytes(nccl.module.get_unique_id())
    with pytest.raises(CollectiveFailed, match="joining NCCL: unhandled cuda error"):
        nccl_join.join(nccl, nccl_library.loaded_library(), unique_id, 2, 0, 20.0, AbortFlag())


def test_that_something_is_under_way_is_told_from_errors() -> None:
    """This CuPy or another may know the status or stumble over it."""
    nccl = real()
    for status in (IN_PROGRESS, 6):
        with pytest.raises((nccl.module.NcclError, KeyError)) as caught:
            nccl.module.check_status(status)
        assert nccl.status_of(caught.value) in ((IN_PROGRESS,) if status == IN_PROGRESS else (6, None))


def test_a_joining_that_cannot_be_given_up_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    told, hangs = threading.Event(), threading.Event()
    monkeypatch.setattr(nccl_end, "ABORT_LIMIT_S", 0.05)
    monkeypatch.setattr(nccl_end, "end_process", lambda limit_s: told.set())

    def begin(communicator: Any, *_: Any) -> int:
        communicator._obj.value = 5
        return IN_PROGRESS

    def state_of(communicator: Any, state: Any) -> int:
        state._obj.value = IN_PROGRESS
        return 0

    stub: Any = SimpleNamespace(
        ncclCommInitRankConfig=begin,
        ncclCommGetAsyncError=state_of,
        ncclCommAbort=lambda communicator: hangs.wait(20.0),
    )
    flag = AbortFlag()
    flag.set("another generation")

    def joining() -> None:
        with pytest.raises(CollectiveAborted):
            nccl_join._join_without_blocking(stub, ID, 2, 0, time.monotonic() + 20.0, flag)

    thread = threading.Thread(target=joining, daemon=True)
    thread.start()
    assert told.wait(10.0)
    hangs.set()
    thread.join(10.0)
    assert not thread.is_alive()
