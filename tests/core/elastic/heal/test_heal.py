"""A state is copied from its holders bit for bit or not at all; a copy under way can always be given up."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from bagua_core.communication import traffic
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Communicator, Pending
from bagua_core.elastic.heal import heal
from bagua_core.elastic.heal.heal import HealMismatch, Transfer, receive_state, send_state
from bagua_core.elastic.heal.received_state import Staging
from tests.core.communication.in_process import InProcessCommunicator, build_in_process
from tests.core.communication.worlds import DEADLINE_S, await_true, gloo_world, run_ranks
from tests.core.elastic.state.trainings import Training, through_the_wire, wire_form
from tests.lab.left_open import started_since


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small state too travels in several pieces; no multiple of the alignment."""
    monkeypatch.setattr(heal, "CHUNK_BYTES", 1000)


def state_of(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "weights": {f"w{n}": torch.randn(n * 97 + 1) for n in range(12)},
        "half": torch.randn(33).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False, True]),
        "transposed": torch.randn(5, 7).t(),
        "numbers": [1, -(2**62), 0.1, None, True, "ü", (1, 2), {3: "x"}],
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def heal_in(
    world: list[Any], holders: tuple[int, ...], receivers: tuple[int, ...], state: dict[str, Any]
) -> list[Any]:
    """What each rank ends with."""

    def act(communicator: Communicator) -> Any:
        if communicator.global_rank in holders:
            send_state(communicator, state, holders, receivers)
            return state
        return receive_state(communicator, holders) if communicator.global_rank in receivers else None

    return run_ranks(world, act)


def test_copies_are_counted_in_bytes_and_seconds() -> None:
    before = traffic.copied.total_bytes, traffic.copied.total_s
    heal_in(build_in_process(2), (0,), (1,), {"weights": torch.zeros(1000)})
    assert traffic.copied.total_bytes >= before[0] + 4000
    assert traffic.copied.total_s > before[1]


def test_what_arrives_of_a_copy_is_counted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """It distinguishes a copy that goes on from one that hangs."""
    counts = []
    put = Staging.put

    def noted(staging: Staging, begin: int, chunk: torch.Tensor) -> None:
        counts.append(traffic.state_arrived.total_bytes)
        put(staging, begin, chunk)

    monkeypatch.setattr(Staging, "put", noted)
    heal_in(build_in_process(2), (0,), (1,), {"weights": torch.zeros(1000)})
    assert [b - a for a, b in pairwise(counts)] == [1000] * (len(counts) - 1) and len(counts) >= 4


def test_a_copy_that_is_sent_is_no_traffic_of_steps() -> None:
    world = gloo_world(2)
    before = traffic.to_collectives.total_bytes
    heal_in(world, (0,), (1,), {"weights": torch.zeros(1000)})
    assert traffic.to_collectives.total_bytes == before
    run_ranks(world, lambda c: c.allreduce(torch.zeros(1000)).wait())
    assert traffic.to_collectives.total_bytes == before + 2 * 4000


def test_collectives_in_a_world_of_one_are_no_traffic() -> None:
    """Of the one replica that a job of replicas may have."""
    (alone,) = gloo_world(1)
    before = traffic.to_collectives.total_bytes
    alone.allreduce(torch.zeros(1000)).wait()
    assert traffic.to_collectives.total_bytes == before


@pytest.mark.parametrize(
    ("world_size", "holders", "receivers"),
    [
        (2, (0,), (1,)),
        (3, (0, 1), (2,)),
        (3, (0,), (1, 2)),
        (4, (0, 1), (2, 3)),
        (5, (1, 4), (0, 3)),  # not all of the members, in any order
        (7, (0, 1, 2, 3, 4, 5), (6,)),
    ],
)
def test_receivers_get_the_state_bit_for_bit(
    world_size: int, holders: tuple[int, ...], receivers: tuple[int, ...]
) -> None:
    state = state_of(1)
    healed = heal_in(build_in_process(world_size), holders, receivers, state)
    for receiver in receivers:
        assert wire_form(healed[receiver]) == wire_form(state)
        assert healed[receiver]["numbers"] == state["numbers"]


def test_over_real_sockets_too() -> None:
    state = state_of(2)
    healed = heal_in(gloo_world(4), (0, 1), (2, 3), state)
    assert wire_form(healed[2]) == wire_form(healed[3]) == wire_form(state)


@pytest.mark.parametrize(
    "state", [{}, {"only": 3}, {"tiny": torch.ones(1)}], ids=["nothing", "plain", "one tensor"]
)
def test_a_state_smaller_than_its_stripes(state: dict[str, Any]) -> None:
    healed = heal_in(build_in_process(4), (0, 1, 2), (3,), state)
    assert wire_form(healed[3]) == wire_form(state)


def test_a_training_goes_on_alike_after_a_heal() -> None:
    trainings = [Training("adam", seed) for seed in range(3)]
    trainings[1].registry.restore(through_the_wire(trainings[0].registry.capture()))
    for training in trainings[:2]:
        training.train(3, seed=9)

    def act(communicator: InProcessCommunicator) -> None:
        training = trainings[communicator.global_rank]
        if communicator.global_rank < 2:
            send_state(communicator, training.registry.capture(), (0, 1), (2,))
        else:
            training.registry.restore(receive_state(communicator, (0, 1)))
        training.train(2, seed=10)

    run_ranks(build_in_process(3), act)
    forms = [wire_form(training.registry.capture()) for training in trainings]
    assert forms[0] == forms[1] == forms[2]


def test_two_heals_follow_each_other() -> None:
    world = build_in_process(2)
    for seed in (1, 2):
        state = state_of(seed)
        assert wire_form(heal_in(world, (0,), (1,), state)[1]) == wire_form(state)


class Corrupting(InProcessCommunicator):
    """A holder whose n-th message arrives with one bit changed."""

    def __init__(self, honest: InProcessCommunicator, message: int) -> None:
        super().__init__(honest._exchange, honest.generation, honest.global_rank, honest.abort_flag)
        self._message = message
        self._sent = 0

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        self._sent += 1
        if self._sent == self._message:
            tensor = tensor.clone()
            tensor.view(torch.uint8)[tensor.nbytes // 2] ^= 16
        return super().send(tensor, destination, tag)


@pytest.mark.parametrize("message", [1, 2, 3], ids=["its layout", "a chunk", "another chunk"])
def test_a_corrupted_stripe_is_not_used(message: int) -> None:
    """Rank 1 sends its layout, chunks and, last, their checksum: whichever is hit is seen."""
    first, second, receiver = build_in_process(3)
    world = [first, Corrupting(second, message), receiver]
    state = state_of(1)
    # the receiver learns it only at the end, so both holders have sent everything
    what = (
        "holds a state of another layout"
        if message == 1
        else "stripe 1 of the state arrived with another checksum"
    )
    with pytest.raises(HealMismatch, match=what):
        heal_in(world, (0, 1), (2,), state)


def test_a_corrupted_manifest_is_not_used() -> None:
    """Plain values travel in it: a learning rate that arrived as another would go unseen."""
    sender, receiver = build_in_process(2)
    world = [Corrupting(sender, 2), receiver]

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 1:
            with pytest.raises(HealMismatch, match="manifest"):
                receive_state(communicator, (0,))
            sender.abort("healing failed")  # as a generation's end does
        else:
            with pytest.raises(CollectiveAborted):
                send_state(communicator, {"lr": 0.1, "weights": torch.ones(3)}, (0,), (1,))

    run_ranks(world, act)


@pytest.mark.parametrize("holders", [(0,), (0, 1)])
def test_an_abort_in_the_middle_releases_the_receiver(holders: tuple[int, ...]) -> None:
    """One holder sends nothing: a silent peer."""
    world = build_in_process(3)
    running = set(threading.enumerate())

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 2:
            with pytest.raises(CollectiveAborted, match="generation 5"):
                receive_state(communicator, holders)
        elif communicator.global_rank == 0 and len(holders) == 2:
            send_state(communicator, state_of(1), holders, (2,))
            world[2].abort("generation 5")
        elif communicator.global_rank == 1 and len(holders) == 1:
            world[2].abort("generation 5")

    run_ranks(world, act)
    await_true(lambda: not started_since(running), "no thread is left")


def test_an_abort_in_the_middle_releases_the_holder() -> None:
    world = build_in_process(2)

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 0:
            with pytest.raises(CollectiveAborted, match="generation 5"):
                send_state(communicator, state_of(1), (0,), (1,))
        else:
            header = torch.zeros(3, dtype=torch.int64)
            communicator.receive(header, 0, heal.TAG).wait()  # and nothing after it
            world[0].abort("generation 5")

    run_ranks(world, act)


def test_a_lost_holder_is_named() -> None:
    world = build_in_process(3)

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 1:
            communicator.lose("10.0.0.1")
            return
        with pytest.raises(CollectiveFailed) as caught:
            if communicator.global_rank == 0:
                send_state(communicator, state_of(1), (0, 1), (2,))
                # sent before the loss: the next one sees it
                communicator.send(torch.zeros(1), 2, heal.TAG).wait()
            else:
                receive_state(communicator, (0, 1))
        assert caught.value.hosts == ("10.0.0.1",)

    run_ranks(world, act)


# -- beside the step


def test_a_transfer_tells_when_it_is_done() -> None:
    changed, may_end = threading.Condition(), threading.Event()

    def run() -> str:
        assert may_end.wait(DEADLINE_S)
        return "state"

    transfer = Transfer(run, changed)
    assert not transfer.done
    with changed:
        may_end.set()
        assert changed.wait_for(lambda: transfer.done, DEADLINE_S)
    assert (transfer.result, transfer.error) == ("state", None)


def test_a_transfer_keeps_its_error_for_a_waiting_thread() -> None:
    changed = threading.Condition()
    error = CollectiveFailed("gone", ("10.0.0.1",))

    def run() -> None:
        raise error

    transfer = Transfer(run, changed)
    with changed:
        assert changed.wait_for(lambda: transfer.done, DEADLINE_S)
    assert transfer.error is error and transfer.result is None


def test_a_transfer_whose_thread_is_ended_answers_too() -> None:
    changed = threading.Condition()
    transfer = Transfer(sys.exit, changed)
    with changed:
        assert changed.wait_for(lambda: transfer.done, DEADLINE_S)
    assert isinstance(transfer.error, RuntimeError) and isinstance(transfer.error.__cause__, SystemExit)


# -- a peer that is silent and does not die


class Falling(InProcessCommunicator):
    """A holder that falls silent instead of its n-th message."""

    def __init__(self, honest: InProcessCommunicator, message: int) -> None:
        super().__init__(honest._exchange, honest.generation, honest.global_rank, honest.abort_flag)
        self._left = message

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        self._left -= 1
        if not self._left:
            raise CollectiveAborted("it sends nothing any more")
        return super().send(tensor, destination, tag)


@pytest.mark.parametrize(("silent", "message"), [(0, 5), (1, 3)])
def test_a_stripe_that_ends_in_the_middle_ends_the_copy_and_names_its_rank(
    silent: int, message: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its layout and one chunk. Rank 0 sends the header and the manifest before."""
    monkeypatch.setattr(heal, "SILENCE_S", 0.3)
    honest = build_in_process(3)
    world = [Falling(one, message) if rank == silent else one for rank, one in enumerate(honest)]
    running = set(threading.enumerate())

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 2:
            with pytest.raises(
                CollectiveFailed, match=rf"global rank {silent} sent nothing of the state for 0\.3 s"
            ):
                receive_state(communicator, (0, 1))
            for each in world:
                each.abort("entering failed")  # as the member does
        else:
            # It may have sent everything before
            with contextlib.suppress(CollectiveAborted, CollectiveFailed):
                send_state(communicator, state_of(1), (0, 1), (2,))

    run_ranks(world, act)
    await_true(lambda: not started_since(running), "no thread is left")


def test_a_holder_that_begins_nothing_hinders_no_report_of_another_s_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heal, "SILENCE_S", 0.3)
    first, second, receiver = build_in_process(3)
    world = [Falling(first, 5), second, receiver]

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 2:
            with pytest.raises(CollectiveFailed, match="global rank 0 sent nothing of the state"):
                receive_state(communicator, (0, 1))
        elif communicator.global_rank == 0:
            with pytest.raises(CollectiveAborted):
                send_state(communicator, state_of(1), (0, 1), (2,))

    run_ranks(world, act)


def test_a_receiver_that_takes_nothing_more_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heal, "SILENCE_S", 0.3)

    def act(communicator: InProcessCommunicator) -> None:
        if communicator.global_rank == 1:
            communicator.receive(torch.zeros(3, dtype=torch.int64), 0, heal.TAG).wait()  # the header
            return
        with pytest.raises(CollectiveFailed, match=r"global rank 1 took nothing of the state for 0\.3 s"):
            send_state(communicator, state_of(1), (0,), (1,))

    run_ranks(build_in_process(2), act)


class Slow(InProcessCommunicator):
    """A holder that needs a while for each chunk."""

    def __init__(self, honest: InProcessCommunicator) -> None:
        super().__init__(honest._exchange, honest.generation, honest.global_rank, honest.abort_flag)

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Pending:
        if tensor.numel() == heal.CHUNK_BYTES:
            time.sleep(0.15)
        return super().send(tensor, destination, tag)


@pytest.mark.parametrize("holders", [(0,), (0, 1)], ids=["one holder", "the second holder is slow"])
def test_receivers_wait_while_others_are_served(
    holders: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long that takes: for their bulk, and for the rest, which follows the bulks of all."""
    monkeypatch.setattr(heal, "SILENCE_S", 0.5)
    last = len(holders) - 1
    world = build_in_process(4 + last)
    world[last] = Slow(world[last])
    bulk, rest = {"weights": torch.randn(1000 * len(holders))}, {"lr": 0.1}
    receivers = tuple(range(len(holders), len(world)))

    def act(communicator: InProcessCommunicator) -> Any:
        if communicator.global_rank not in holders:
            return receive_state(communicator, holders), receive_state(communicator, holders[:1])
        send_state(communicator, bulk, holders, receivers)
        if communicator.global_rank == 0:
            send_state(communicator, rest, holders[:1], receivers)
        return None

    for copied in run_ranks(world, act)[len(holders) :]:
        assert wire_form(copied) == wire_form((bulk, rest))
