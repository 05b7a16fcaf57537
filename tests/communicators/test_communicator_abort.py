"""What every communicator does when it is aborted, closed or asked for what it can't do."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from bagua_core.communication.communicator import (
    CollectiveAborted,
    CollectiveFailed,
    Communicator,
    Pending,
)
from tests.communicators.transports import RELEASE_S, Transport, World, run_ranks, start_alone
from tests.core.communication.worlds import await_true


def end_late(transport: Transport, kind: str, silent: Communicator, pending: Pending) -> None:
    """Leave nothing running when the test ends: the silent one comes, or the transport has made an end."""
    if transport.late_end:
        start_alone("send" if kind == "receive" else kind, silent).wait()
    await_true(pending.is_done, "the abandoned operation to end")


KINDS = [
    "allreduce",
    "broadcast",
    "allgather",
    "alltoall",
    "alltoall_v",
    "reduce_scatter",
    "reduce",
    "gather",
]

TRIES = 5  # a busy machine may let a thread that is released wait for a processor


@pytest.mark.parametrize("kind", [*KINDS, "scatter", "barrier", "receive"])
def test_abort_releases_a_wait_on_a_silent_peer(transport: Transport, world: World, kind: str) -> None:
    took_s = [release_s(transport, world, kind)]
    while took_s[-1] >= RELEASE_S and len(took_s) < TRIES:
        took_s.append(release_s(transport, world, kind))
    assert min(took_s) < RELEASE_S


def release_s(transport: Transport, world: World, kind: str) -> float:
    """How long after the abort the wait ended."""
    lonely, silent = world(2)
    pending = start_alone(kind, lonely)
    stalls: list[float] = []
    released: list[tuple[float, Exception]] = []

    def wait() -> None:
        try:
            pending.wait(stalls.append, stall_after_s=0.01)
        except CollectiveAborted as error:
            released.append((time.monotonic(), error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    await_true(lambda: len(stalls) >= 3, "three reports of a stall")
    assert 0.01 <= stalls[0] < stalls[1] < stalls[2]
    aborted_s = time.monotonic()
    lonely.abort("a loss, says the test")
    waiter.join(5.0)
    assert not waiter.is_alive()
    assert "a loss, says the test" in str(released[0][1])
    assert not transport.late_end or not pending.is_done()
    with pytest.raises(CollectiveAborted):
        start_alone("allreduce", lonely).wait()  # and nothing starts any more
    end_late(transport, kind, silent, pending)
    return released[0][0] - aborted_s


def test_an_abandoned_operation_still_owns_its_buffer(transport: Transport, world: World) -> None:
    """Why aborted buffers have to be replaced: the late peer's data arrives in them."""
    if not transport.late_write:
        pytest.skip(
            "it has buffers of its own, or ends what was given up sooner or later: nothing to see for certain"
        )
    lonely, silent = world(2)
    tensor = torch.ones(4)
    pending = lonely.allreduce(tensor)
    lonely.abort("given up")
    with pytest.raises(CollectiveAborted):
        pending.wait()
    silent.allreduce(torch.ones(4)).wait()
    await_true(lambda: bool((tensor == 2).all()), "the late write")


def test_an_abort_that_came_first_is_seen(transport: Transport, world: World) -> None:
    lonely, silent = world(2)
    pending = start_alone("allreduce", lonely)
    lonely.abort_flag.set("before anyone waited")
    with pytest.raises(CollectiveAborted, match="before anyone waited"):
        pending.wait()
    lonely.abort("for good")
    end_late(transport, "allreduce", silent, pending)


def test_a_finished_operation_does_not_fail_by_a_later_abort(world: World) -> None:
    members = world(2)

    def act(c: Communicator) -> torch.Tensor:
        tensor = torch.ones(4)
        pending = c.allreduce(tensor)
        await_true(pending.is_done, "the reduction")
        c.abort("afterwards")
        pending.wait()
        return tensor

    assert all(torch.equal(t, torch.full((4,), 2.0)) for t in run_ranks(members, act))


def test_what_it_has_adopted_ends_with_it(world: World) -> None:
    first, other, late = world(1)[0], world(1)[0], world(1)[0]
    first.adopt("other", other)
    assert first.adopted["other"] is other
    first.abort("a loss")
    first.adopt("late", late)
    for adopted in (other, late):
        assert adopted.abort_flag.reason == "a loss"
        with pytest.raises(CollectiveAborted, match="a loss"):
            start_alone("barrier", adopted).wait()


def test_what_the_caller_gets_wrong_is_said_at_once(world: World) -> None:
    (only,) = world(1)
    with torch.device(only.device):
        with pytest.raises(ValueError, match="global_rank 4"):
            only.send(torch.ones(1), destination=4, tag=0)
        with pytest.raises(ValueError, match="allgather"):
            only.allgather(torch.ones(3), torch.ones(2))
        with pytest.raises(ValueError, match=r"alltoall.*\(2, 4\)"):
            only.alltoall(torch.ones(2, 4), torch.ones(2, 4))
        with pytest.raises(ValueError, match="reduce_scatter"):
            only.reduce_scatter(torch.ones(1, 4), torch.ones(1, 4))
        with pytest.raises(ValueError, match="gather needs an output"):
            only.gather(None, torch.ones(1), destination=0)
        with pytest.raises(ValueError, match="scatter needs the parts"):
            only.scatter(torch.ones(1), None, source=0)
        with pytest.raises(ValueError, match="scatter"):
            only.scatter(torch.ones(1), torch.ones(2, 1), source=0)
        with pytest.raises(ValueError, match="global_rank 1"):
            only.reduce(torch.ones(1), destination=1)
        with pytest.raises(ValueError, match=r"alltoall_v.*\[2\] rows"):
            only.alltoall_v(torch.ones(1), torch.ones(1), [1], [2])
        tensor = torch.ones(2, 4)
        with pytest.raises(ValueError, match="in place"):
            only.alltoall(tensor[:1], tensor[:1])


def test_failures_are_one_type() -> None:
    assert issubclass(CollectiveAborted, CollectiveFailed)
