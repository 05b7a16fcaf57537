"""Large messages to several ranks travel in slices: all, once, few at a time; and what ends one in the middle."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from bagua_core.communication import slices
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed
from bagua_core.communication.slices import (
    SLICE_BYTES,
    WINDOW_BYTES,
    alltoall_pays,
    alltoall_tag,
    alltoall_turns,
    swap_turns,
)
from bagua_core.communication.transports import gloo
from bagua_core.communication.transports.gloo import GlooCommunicator
from tests.core.communication.worlds import await_true, gloo_world, run_ranks


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("part_bytes", [1, SLICE_BYTES, SLICE_BYTES + 1, 3 * SLICE_BYTES - 5])
def test_every_slice_is_sent_once_and_awaited_by_its_receiver(world_size: int, part_bytes: int) -> None:
    sent, awaited = [], []
    for rank in range(world_size):
        for turn in alltoall_turns(rank, world_size, part_bytes):
            sent.append((rank, turn.destination, turn.number, turn.begin, turn.end))
            awaited.append((turn.source, rank, turn.number, turn.begin, turn.end))
    assert sorted(sent) == sorted(awaited)
    assert len(set(sent)) == len(sent)
    for source in range(world_size):
        for destination in set(range(world_size)) - {source}:
            slices = sorted(s[3:] for s in sent if s[:2] == (source, destination))
            assert slices[0][0] == 0 and slices[-1][1] == part_bytes
            assert all(a[1] == b[0] for a, b in itertools.pairwise(slices))
            assert all(0 < end - begin <= SLICE_BYTES for begin, end in slices)


def test_no_rank_is_sent_two_slices_in_one_turn() -> None:
    for at_once in zip(*(alltoall_turns(rank, 5, 2 * SLICE_BYTES) for rank in range(5)), strict=True):
        assert sorted(t.destination for t in at_once) == list(range(5))


@pytest.mark.parametrize("message_bytes", [1, SLICE_BYTES, 2 * SLICE_BYTES + 9])
def test_a_swap_sends_each_neighbour_everything_and_awaits_as_much(message_bytes: int) -> None:
    sent, awaited = [], []
    for rank in range(5):
        for turn in swap_turns([(rank - 1) % 5, (rank + 1) % 5], message_bytes):
            sent.append((rank, turn.destination, turn.round, turn.begin, turn.end))
            awaited.append((turn.source, rank, turn.round, turn.begin, turn.end))
    assert sorted(sent) == sorted(awaited)
    for source, destination in ((2, 1), (2, 3)):
        slices_of = sorted(s[3:] for s in sent if s[:2] == (source, destination))
        assert sum(end - begin for begin, end in slices_of) == message_bytes
        assert slices_of[0][0] == 0 and all(a[1] == b[0] for a, b in itertools.pairwise(slices_of))


def test_only_what_exceeds_a_window_travels_in_slices() -> None:
    assert not alltoall_pays(1, 10 * WINDOW_BYTES)
    assert not alltoall_pays(2, WINDOW_BYTES)
    assert alltoall_pays(2, WINDOW_BYTES + 1)
    assert alltoall_pays(5, WINDOW_BYTES // 4 + 1)


def test_tags_of_neighbours_differ_and_fit_gloo() -> None:
    assert alltoall_tag(1) + 16 * 2**30 // SLICE_BYTES <= alltoall_tag(2)
    assert all(
        0 < alltoall_tag(n) < 2**31 - 16 * 2**30 // SLICE_BYTES + 1 for n in (0, 1, 16383, 16384, 10**9)
    )


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_several_at_once_bring_each_rank_its_parts(world_size: int) -> None:
    """Of unequal sizes and none a multiple of a slice; all wait in the opposite order."""
    sizes = [WINDOW_BYTES // (world_size - 1) + odd for odd in (1, 3 * SLICE_BYTES + 7, 77)]

    def values(source: int, destination: int, size: int) -> torch.Tensor:
        seed = (source * 100 + destination) * 10**8 + size
        return torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )

    def act(c: GlooCommunicator) -> None:
        ranks = range(world_size)
        outputs = [torch.zeros((world_size, size), dtype=torch.uint8) for size in sizes]
        under_way = [
            c.alltoall(output, torch.stack([values(c.global_rank, to, output.shape[1]) for to in ranks]))
            for output in outputs
        ]
        for pending, output in reversed(list(zip(under_way, outputs, strict=True))):
            pending.wait()
            for source in ranks:
                assert torch.equal(output[source], values(source, c.global_rank, output.shape[1]))

    run_ranks(gloo_world(world_size), act)


@pytest.mark.parametrize("peers_of", ["both neighbours", "all, each in another order", "unequal numbers"])
def test_swaps_bring_what_the_peers_sent(peers_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tensors, some of less than a slice. A window of one slice provokes every possible cycle of waits."""
    monkeypatch.setattr(slices, "WINDOW_BYTES", 0)
    ranks = 5
    graph = {
        "both neighbours": [[(r - 1) % ranks, (r + 1) % ranks] for r in range(ranks)],
        "all, each in another order": [
            sorted(set(range(ranks)) - {r}, key=lambda p, r=r: (p * (r + 2)) % 7) for r in range(ranks)
        ],
        "unequal numbers": [[1], [0, 2], [3, 1], [2, 4], [3]],
    }[peers_of]
    sizes = [5, SLICE_BYTES // 4, SLICE_BYTES // 4 + 1, 5 * SLICE_BYTES // 4 + 3]

    def weights(rank: int, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32) + 1000 * rank

    def act(c: GlooCommunicator) -> None:
        outgoing = [weights(c.global_rank, size) for size in sizes]
        incoming = {peer: [torch.zeros(size) for size in sizes] for peer in graph[c.global_rank]}
        for pending in c.swap(outgoing, incoming, 7):
            pending.wait()
        for peer, theirs in incoming.items():
            for size, arrived in zip(sizes, theirs, strict=True):
                assert torch.equal(arrived, weights(peer, size))

    run_ranks(gloo_world(ranks), act)


def test_an_abort_ends_one_that_a_peer_does_not_join() -> None:
    world = gloo_world(3)
    parts = torch.ones((3, WINDOW_BYTES), dtype=torch.uint8)
    absent, *present = world
    pendings = [c.alltoall(torch.empty_like(parts), parts) for c in present]
    assert not any(p.is_done() for p in pendings)
    for communicator in present:
        communicator.abort("the third does not come")
    for pending in pendings:
        with pytest.raises(CollectiveAborted, match="does not come"):
            pending.wait()
    absent.abort("over")


def test_a_group_that_fails_in_the_middle_names_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first slices arrive; then one rank leaves."""
    monkeypatch.setattr(slices, "WINDOW_BYTES", SLICE_BYTES)
    staying, leaving = gloo_world(2, timeout_s=3.0)
    output = torch.zeros((2, 8 * SLICE_BYTES), dtype=torch.uint8)
    pending = staying.alltoall(output, torch.ones_like(output))
    tag = alltoall_tag(1)
    for number in (0, 1):
        leaving.send(torch.ones(1), 0, 0)  # of the script's own: not taken for a slice
        sent = leaving._group.send([torch.full((SLICE_BYTES,), 7, dtype=torch.uint8)], 0, tag + number)
        sent.wait()
    await_true(lambda: bool(output[1, 2 * SLICE_BYTES - 1] == 7), "two slices to arrive")
    assert not pending.is_done()
    leaving.close()
    with pytest.raises(CollectiveFailed, match=r"127\.0\.0\.1|Timed out"):
        pending.wait()
    assert not output[1, 2 * SLICE_BYTES :].any()
    ended = [t for t in threading.enumerate() if t.name == "gloo-alltoall"]
    await_true(lambda: not any(t.is_alive() for t in ended), "its thread to end")


def test_a_mistake_beside_the_transport_is_raised_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not lost in the thread, whose end would go unnoticed."""

    def mistaken(*arguments: object) -> None:
        raise TypeError("a mistake")

    monkeypatch.setattr(gloo, "reduce_parts", mistaken)
    parts = torch.ones((2, WINDOW_BYTES), dtype=torch.float32)
    world = gloo_world(2)
    pendings = run_ranks(world, lambda c: c.reduce_scatter(torch.empty(WINDOW_BYTES), parts))
    for pending in pendings:
        with pytest.raises(TypeError, match="a mistake"):
            pending.wait()


def test_tags_of_slices_are_refused_to_scripts() -> None:
    one, _ = gloo_world(2)
    with pytest.raises(ValueError, match=str(slices.FIRST_TAG)):
        one.send(torch.ones(1), 1, slices.FIRST_TAG)
    with pytest.raises(ValueError, match="-1"):
        one.receive(torch.ones(1), 1, -1)
