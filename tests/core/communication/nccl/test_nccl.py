"""NcclCommunicator beyond the contract: the order of its work on a GPU, and its end. By fakes."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bagua_core.communication.communicator import (
    AbortFlag,
    CollectiveAborted,
    CollectiveFailed,
    Lane,
    Pending,
    ReduceOp,
)
from bagua_core.communication.nccl import nccl_library
from bagua_core.communication.nccl.nccl import NcclCommunicator, build_nccl
from bagua_core.communication.nccl.nccl_end import abort_handle, bounded
from bagua_core.communication.nccl.nccl_library import Nccl, NcclUnavailableError
from bagua_core.communication.reducible import NATIVE
from tests.core.communication.emulated_nccl import (
    NUMBERS,
    TYPES,
    Handle,
    Module,
    _World,
    emulated_world,
)
from tests.core.communication.nccl_worlds import nccl_world, skip_without_nccl
from tests.core.communication.worlds import DEADLINE_S, await_true, run_ranks

STREAM, MESSAGES = 11, 12


class NotingMark:
    def __init__(self, stream: NotingStream) -> None:
        self._stream = stream
        self.past = stream.is_quick

    def is_past(self) -> bool:
        return self.past

    def before_current(self) -> None:
        self._stream.note("current waits for mark")

    def wait(self, look: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.past:
            look()
            assert time.monotonic() < deadline_s
            threading.Event().wait(0.001)
        look()


class NotingNow:
    """A moment of the script's stream."""

    def __init__(self, stream: NotingStream) -> None:
        self._stream = stream

    def is_past(self) -> bool:
        return False

    def before_current(self) -> None:
        self._stream.note("stream waits for script")

    def wait(self, look: Callable[[], None]) -> None:
        raise AssertionError("the host does not wait for the script's work")


class NotingStream:
    """Writes down what it is asked. is_quick: a mark is past as soon as it is made."""

    def __init__(self, address: int, notes: list[str], is_quick: bool = True) -> None:
        self.address = address
        self.is_quick = is_quick
        self.notes = notes
        self.used: list[torch.Tensor] = []
        self.marks: list[NotingMark] = []

    def note(self, what: str) -> None:
        self.notes.append(what)

    def now(self) -> NotingNow:
        self.note("moment of script")
        return NotingNow(self)

    def mark(self) -> NotingMark:
        self.note("mark")
        self.marks.append(NotingMark(self))
        return self.marks[-1]

    def on_it(self) -> AbstractContextManager[object]:
        @contextmanager
        def noted() -> Iterator[None]:
            self.note("stream is current")
            try:
                yield
            finally:
                self.note("stream is current no more")

        return noted()

    def uses(self, tensor: torch.Tensor) -> None:
        self.used.append(tensor)

    def give_back(self) -> None:
        self.note("given back")


class One:
    """A world of one rank over noting streams, or one rank of a larger one whose others never come."""

    def __init__(self, is_quick: bool = True, world_size: int = 1) -> None:
        self.notes: list[str] = []
        self.stream = NotingStream(STREAM, self.notes, is_quick)
        self.module = Module()
        self.handles = [Handle(self.module, _World(world_size), 0) for _ in range(2)]
        for handle in self.handles:
            self._note_calls(handle)
        self.communicator = NcclCommunicator(
            Nccl(self.module),
            (self.handles[0], self.stream),
            (self.handles[1], NotingStream(MESSAGES, self.notes)),
            torch.device("cpu"),
            1,
            0,
            world_size,
            AbortFlag(),
        )

    def _note_calls(self, handle: Handle) -> None:
        admit = handle._admit

        def noting(what: str, stream: int) -> None:
            self.notes.append(f"{what} on {stream}")
            admit(what, stream)

        handle._admit = noting  # type: ignore[method-assign]


@pytest.fixture
def one() -> Iterator[One]:
    made = One()
    yield made
    made.communicator.abort("the test is over")


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


# -- on a GPU


@pytest.mark.gpu
def test_work_queued_before_and_after_needs_no_wait_of_the_script() -> None:
    skip_without_nccl(2)
    world = nccl_world(2)

    def act(c: NcclCommunicator) -> list[float]:
        with torch.cuda.stream(torch.cuda.Stream(c.device)):  # type: ignore[no-untyped-call]
            tensor = torch.zeros(1 << 24, device=c.device)
            for _ in range(20):
                tensor += 1.0  # still under way when the reduction is asked for
            c.allreduce(tensor).wait()
            tensor += 1.0
            return [float(tensor.min()), float(tensor.max())]

    assert run_ranks(world, act) == [[41.0, 41.0]] * 2
    for communicator in world:
        communicator.abort("the test is over")


@pytest.mark.gpu
def test_an_abort_on_a_gpu_ends_the_kernels_in_time() -> None:
    skip_without_nccl(2)
    lonely, silent = nccl_world(2)
    tensors = [torch.ones(4, device=c.device) for c in (lonely, silent)]
    run_ranks([0, 1], lambda r: (lonely, silent)[r].allreduce(tensors[r]).wait())  # they are connected
    pending = lonely.allreduce(tensors[0])
    began_s = time.monotonic()
    lonely.abort("lost")
    await_true(pending.is_done, "the kernel to end")
    print(f"ended {time.monotonic() - began_s:.3f} s after the abort")
    silent.abort("the test is over")


@pytest.mark.gpu
def test_a_peer_that_does_not_join_is_given_up() -> None:
    skip_without_nccl(2)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(CollectiveFailed, match="meeting for NCCL"):
        build_nccl(1, 0, 2, store, torch.device("cuda", 0), 1.0, AbortFlag())
