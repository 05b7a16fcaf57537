"""The NCCL communicator without a GPU: order of work, failures, messages."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Lane,
    Pending,
    ReduceOp,
)
from bagua_core.communication.nccl.nccl import NcclCommunicator
from bagua_core.communication.nccl.nccl_library import Nccl
from bagua_core.communication.reducible import NATIVE
from tests.core.communication.emulated_nccl import (
    NUMBERS,
    TYPES,
    Handle,
    Module,
    _World,
    emulated_world,
)
from tests.core.communication.nccl.noting_gpu import STREAM, NotingStream, One
from tests.core.communication.worlds import await_true, run_ranks

# -- the order of the work


def test_the_scripts_work_comes_before_and_what_follows_after(one: One) -> None:
    pending = one.communicator.allreduce(torch.ones(3))
    assert one.notes == [
        "moment of script",
        "stream is current",
        "stream waits for script",
        f"allReduce on {STREAM}",
        "stream is current no more",
        "mark",
    ]
    pending.wait()
    assert one.notes[6:] == ["current waits for mark"]


def test_what_is_done_with_the_result_is_done_on_the_stream_too(
    one: One, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bagua_core.communication.nccl import nccl

    monkeypatch.setattr(nccl, "divide", lambda total, count: one.notes.append("divide"))
    one.communicator.allreduce(torch.ones(3), ReduceOp.AVG)
    assert one.notes[3:6] == [f"allReduce on {STREAM}", "divide", "stream is current no more"]


def test_tensors_are_handed_over_by_address_and_kept(one: One) -> None:
    seen: list[tuple[Any, ...]] = []
    handle = one.handles[0]
    original = handle.allGather

    def noting(*arguments: Any) -> None:
        seen.append(arguments)
        original(*arguments)

    handle.allGather = noting  # type: ignore[method-assign, assignment]
    tensor, output = torch.ones(3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64)
    pending = one.communicator.allgather(output, tensor)
    assert seen == [(tensor.data_ptr(), output.data_ptr(), 24, NUMBERS["NCCL_UINT8"], STREAM)]
    assert one.stream.used == [tensor, output] and pending._tensors == (tensor, output)  # type: ignore[attr-defined]


def test_only_a_type_that_nccl_lacks_is_copied(one: One) -> None:
    handle = one.handles[0]
    seen: list[tuple[int, int]] = []
    original = handle.allReduce

    def noting(*arguments: Any) -> None:
        seen.append((arguments[0], arguments[3]))
        original(*arguments)

    handle.allReduce = noting  # type: ignore[method-assign, assignment]
    for dtype in (*NATIVE, torch.bool, torch.complex64, torch.int16):
        tensor = torch.ones(4, dtype=dtype)
        one.communicator.allreduce(tensor).wait()
        address, kind = seen.pop()
        if dtype in NATIVE:
            assert kind == next(n for name, n in NUMBERS.items() if TYPES[name] is dtype)
        assert (address == tensor.data_ptr()) == (dtype is not torch.int16)


# -- waiting


def test_the_host_waits_until_the_stream_has_come_to_the_mark() -> None:
    one = One(is_quick=False)
    pending = one.communicator.allreduce(torch.ones(3))
    assert not pending.is_done()
    stalls: list[float] = []
    waiter = threading.Thread(target=lambda: pending.wait(stalls.append, 0.01))
    waiter.start()
    await_true(lambda: len(stalls) >= 3, "three reports of a stall")
    assert waiter.is_alive() and 0.01 <= stalls[0] < stalls[1]
    one.stream.marks[0].past = True
    waiter.join(5.0)
    assert not waiter.is_alive() and pending.is_done()
    assert one.notes[-1] == "current waits for mark"


def test_no_call_blocks_for_peers_that_have_not_come() -> None:
    """A first operation connects the peers; those behind it keep their order."""
    here, there = emulated_world(2)
    began_s = time.monotonic()
    tensors = [torch.full((2,), float(i)) for i in range(3)]
    pendings = [here.allreduce(tensors[0]), here.broadcast(tensors[1], 1), here.allreduce(tensors[2])]
    assert time.monotonic() - began_s < 0.5 and not any(p.is_done() for p in pendings)
    assert [what for what, _ in here._line.handle.calls] == ["allReduce"]  # type: ignore[attr-defined]
    later = [torch.full((2,), 10.0 + i) for i in range(3)]
    for pending in [there.allreduce(later[0]), there.broadcast(later[1], 1), there.allreduce(later[2])]:
        threading.Thread(target=pending.wait, daemon=True).start()
    for pending in pendings:
        pending.wait()
    assert [t.tolist() for t in tensors] == [[10.0] * 2, [11.0] * 2, [14.0] * 2]


@pytest.mark.parametrize("is_with_gpu", [False, True])
def test_a_failed_peer_is_a_failure_of_the_operation(is_with_gpu: bool) -> None:
    one = One(is_quick=False, world_size=1 if is_with_gpu else 2)
    pending = one.communicator.allreduce(torch.ones(3))
    handle = one.handles[0]
    if is_with_gpu:
        handle._open = [SimpleNamespace(done=False)]  # type: ignore[list-item]
    handle.lose()
    with pytest.raises(CollectiveFailed, match=r"allreduce: .*NCCL status 6") as caught:
        pending.wait()
    assert not isinstance(caught.value, CollectiveAborted)
    if not is_with_gpu:
        assert pending.is_done()
        with pytest.raises(CollectiveFailed):
            pending.wait()


def test_a_call_that_nccl_refuses_is_a_failure(one: One) -> None:
    one.handles[0].ended = "broken"
    with pytest.raises(CollectiveFailed, match="broadcast: NCCL status 5"):
        one.communicator.broadcast(torch.ones(3), 0).wait()
    one.handles[0].ended = ""
    one.communicator.broadcast(torch.ones(3), 0).wait()


def test_a_call_never_sleeps_while_nccl_is_at_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient hook starts collectives: backward must not stand still for the network."""
    here, there = emulated_world(2)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("a call slept"))
    for c in (here, there):
        for _ in range(3):
            c.allreduce(torch.ones(2))
    monkeypatch.undo()
    run_ranks([here, there], lambda c: c.allreduce(torch.ones(2)).wait())


def test_following_leaves_the_host_free() -> None:
    one = One(is_quick=False)
    one.communicator.allreduce(torch.ones(3)).follow()
    assert one.notes[-1] == "current waits for mark" and not one.stream.marks[0].past


def test_work_that_an_abort_ended_is_no_result() -> None:
    """ncclCommAbort ends the kernels, so that the mark is past as if they had come to their end."""
    one = One(is_quick=False)
    pending = one.communicator.allreduce(torch.ones(3))
    one.communicator.abort("lost")
    one.stream.marks[0].past = True
    for wait in (pending.wait, pending.follow):
        with pytest.raises(CollectiveAborted, match="lost"):
            wait()


class OutOfMemoryError(RuntimeError):
    """torch's."""


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error"), KeyError("x")]
)
def test_an_error_of_this_process_is_no_failed_collective(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making the generation anew would not help; the script gets the error as it is."""
    from bagua_core.communication.nccl import nccl

    one = One()

    def full(tensor: torch.Tensor, op: ReduceOp) -> Any:
        raise error

    monkeypatch.setattr(nccl, "carrier_of", full)
    failed = one.communicator.allreduce(torch.ones(3))
    monkeypatch.undo()
    with pytest.raises(type(error)) as caught:
        failed.wait()
    assert caught.value is error
    # Peers are in an operation that was not begun here: a later one must not be taken for it.
    with pytest.raises(CollectiveFailed, match="an operation before it failed"):
        one.communicator.allreduce(torch.ones(3)).wait()
    assert not any(note.startswith("allReduce") for note in one.notes)


@pytest.mark.parametrize("status", [1, 5, 8])
def test_a_status_that_cupy_has_no_text_for_is_nccls(status: int) -> None:
    nccl = Nccl(Module())
    assert nccl.status_of(KeyError(status)) == status
    assert nccl.status_of(KeyError("allReduce")) is None and nccl.status_of(MemoryError()) is None


def test_a_failure_of_a_lane_ends_the_wait_for_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of a lane are followed, and only the last one of the step is waited for."""
    one = One(is_quick=False)
    lane = Handle(one.module, _World(2), 0)
    flag = one.communicator.abort_flag
    stream = NotingStream(21, one.notes, is_quick=False)
    other = NcclCommunicator(
        Nccl(one.module), (lane, stream), (lane, stream), torch.device("cpu"), 1, 0, 2, flag
    )
    one.communicator.lanes = {Lane.STATISTICS: other}
    pending = one.communicator.allreduce(torch.ones(3))
    other.allreduce(torch.ones(3))
    lane.lose()
    with pytest.raises(CollectiveFailed, match="NCCL status 6"):
        pending.wait()


# -- messages


def test_messages_that_cross_start_together_and_in_the_order_of_tags() -> None:
    world = emulated_world(2)

    def act(c: NcclCommunicator) -> list[float]:
        peer = 1 - c.global_rank
        arrived = [torch.zeros(1) for _ in range(3)]
        order = [2, 0, 1] if c.global_rank else [0, 1, 2]
        begun: list[Pending] = [c.receive(arrived[tag], peer, tag) for tag in order]
        begun += [c.send(torch.tensor([10.0 * c.global_rank + tag]), peer, tag) for tag in reversed(order)]
        for pending in begun:
            pending.wait()
        return [float(t) for t in arrived]

    assert run_ranks(world, act) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]
    calls = world[0]._messages_line.handle.calls  # type: ignore[attr-defined]
    assert len(calls) == 6 and not world[0]._line.handle.calls  # type: ignore[attr-defined]


def test_a_message_does_not_wait_for_a_collective() -> None:
    """Copies of the state travel beside the steps, from another thread."""
    world = emulated_world(2)

    def act(c: NcclCommunicator) -> None:
        if c.global_rank == 0:
            blocked = c.allreduce(torch.ones(1))
            c.send(torch.ones(1), 1, 1).wait()
            blocked.wait()
        else:
            c.receive(torch.zeros(1), 0, 1).wait()
            c.allreduce(torch.ones(1)).wait()

    run_ranks(world, act)
