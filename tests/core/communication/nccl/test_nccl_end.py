"""How the NCCL communicator ends: abort, close, and what is missing for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import (
    CollectiveAborted,
)
from bagua_core.communication.nccl import nccl_library
from bagua_core.communication.nccl.nccl_end import abort_handle, bounded
from bagua_core.communication.nccl.nccl_library import Nccl, NcclUnavailableError
from tests.core.communication.emulated_nccl import (
    NUMBERS,
    Handle,
    Module,
    _World,
)
from tests.core.communication.nccl.noting_gpu import One
from tests.core.communication.worlds import await_true

# -- the end


def test_an_abort_ends_the_kernels_of_both_once() -> None:
    one = One(is_quick=False)
    pending = one.communicator.allreduce(torch.ones(1))
    one.communicator.abort("lost")
    one.communicator.abort("again")
    await_true(lambda: [h.ended for h in one.handles] == ["aborted"] * 2, "both to be aborted")
    await_true(lambda: one.notes.count("given back") == 2, "both streams to be free for others")
    with pytest.raises(CollectiveAborted, match="lost"):
        pending.wait()
    for refused in (
        one.communicator.allreduce(torch.ones(1)),
        one.communicator.send(torch.ones(1), 0, 0),
        one.communicator.barrier(),
    ):
        with pytest.raises(CollectiveAborted, match="lost"):
            refused.wait()


def test_an_abort_gets_through_while_a_call_hangs() -> None:
    """A communicator that blocks, in a call for a peer that is silent: only its abort ends that."""
    one = One()
    released = threading.Event()
    handle = one.handles[0]
    handle.allReduce = lambda *_: released.wait(20.0)  # type: ignore[method-assign, assignment]
    handle.abort = released.set  # type: ignore[method-assign]
    hanging = threading.Thread(target=lambda: one.communicator.allreduce(torch.ones(1)))
    hanging.start()
    began_s = time.monotonic()
    one.communicator.abort("lost")
    hanging.join(10.0)
    assert not hanging.is_alive() and time.monotonic() - began_s < 5.0


@pytest.mark.parametrize("how", ["abort", "destroy"])
def test_the_end_runs_with_the_communicators_device(how: str) -> None:
    """NCCL selects the device again that the thread had, which in a new thread is GPU 0, and that makes a context."""
    one = One()
    setattr(one.handles[0], how, lambda: one.notes.append(how))
    setattr(one.handles[1], how, lambda: one.notes.append(f"{how} of messages"))
    if how == "abort":
        one.communicator.abort("lost")
    else:
        one.communicator.close()
    await_true(lambda: one.notes.count("given back") == 2, "both to end")
    for ended in (how, f"{how} of messages"):
        place = one.notes.index(ended)
        entered, left = (
            one.notes[:place].count("stream is current"),
            one.notes[:place].count("stream is current no more"),
        )
        assert entered > left


def test_an_abort_that_does_not_return_ends_the_process() -> None:
    hangs, told = threading.Event(), threading.Event()

    class Stuck(Handle):
        def abort(self) -> None:
            assert hangs.wait(20.0)

    limits: list[float] = []

    def stuck(limit_s: float) -> None:
        limits.append(limit_s)
        told.set()

    handle = Stuck(Module(), _World(1), 0)
    aborting = threading.Thread(target=bounded, args=(handle.abort, 0.05, stuck), daemon=True)
    aborting.start()
    assert told.wait(10.0) and limits == [0.05]
    hangs.set()
    aborting.join(10.0)
    assert not aborting.is_alive()


def test_an_abort_that_returns_is_not_held_against_the_process() -> None:
    guards_before = {t for t in threading.enumerate() if t.name == "nccl-abort-guard"}
    handle = Handle(Module(), _World(1), 0)
    abort_handle(handle)
    assert handle.ended == "aborted"
    await_true(
        lambda: {t for t in threading.enumerate() if t.name == "nccl-abort-guard"} <= guards_before,
        "the guard to end",
    )


def test_closing_gives_the_communicators_back() -> None:
    one = One()
    one.communicator.close()
    await_true(lambda: [h.ended for h in one.handles] == ["destroyed"] * 2, "both to be destroyed")
    with pytest.raises(CollectiveAborted, match="closed"):
        one.communicator.allreduce(torch.ones(1)).wait()


# -- what it cannot do


def test_other_tensors_are_refused(one: One) -> None:
    with pytest.raises(ValueError, match="carries tensors of cpu, not meta"):
        one.communicator.allreduce(torch.ones(1, device="meta"))
    with pytest.raises(ValueError, match="contiguous"):
        one.communicator.broadcast(torch.ones(2, 3).t(), 0)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("cupy", r"bagua-elastic\[cuda12\]"), ("libnccl", "nvidia-nccl-cu12 or nvidia-nccl-cu13")],
)
def test_what_is_missing_is_named_with_what_to_install(
    missing: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy: Any = None
    cuda: Any = None
    if missing == "libnccl":
        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cuda.nccl = SimpleNamespace(available=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    load: Callable[[], Nccl] = nccl_library.load.__wrapped__
    with pytest.raises(NcclUnavailableError, match=words):
        load()


def test_its_numbers_are_those_of_this_cupy() -> None:
    try:
        module = nccl_library.load().module
    except NcclUnavailableError as error:
        pytest.skip(str(error))
    assert {name: getattr(module, name) for name in NUMBERS} == NUMBERS
    for name in ("NCCL_SUM", "NCCL_PROD", "NCCL_MAX", "NCCL_MIN"):
        assert getattr(module, name) == getattr(Module, name)
