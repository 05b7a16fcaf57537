"""A wait blocks in Gloo itself only where the one before it ended soon: one that does not end costs an exception."""

from __future__ import annotations

import threading

import torch
from torch.distributed import HashStore

from bagua_core.communication.communicator import AbortFlag
from bagua_core.communication.transports.gloo import GlooCommunicator, build_gloo
from bagua_core.communication.transports.gloo_pending import BRIEF_S, BriefWaits, GlooCollective
from tests.core.communication.worlds import await_true, run_ranks

LIMIT_S = 60.0


def test_the_next_wait_is_guessed_by_the_last() -> None:
    waits = BriefWaits()
    assert waits.is_likely
    waits.ended(2 * BRIEF_S)
    assert not waits.is_likely
    waits.ended(BRIEF_S / 2)
    assert waits.is_likely


def test_a_wait_for_a_late_rank_is_learned_from() -> None:
    store = HashStore()
    world: list[GlooCommunicator] = run_ranks(
        [0, 1], lambda rank: build_gloo(1, rank, 2, store, "127.0.0.1", LIMIT_S, AbortFlag())
    )
    tensor = torch.ones(1)
    pending = world[0].allreduce(tensor)
    assert isinstance(pending, GlooCollective)

    def late() -> None:
        await_true(lambda: pending._began_s is not None, "rank 0 waits")
        threading.Event().wait(4 * BRIEF_S)
        world[1].allreduce(torch.ones(1)).wait()

    other = threading.Thread(target=late)
    other.start()
    pending.wait()
    other.join()
    assert tensor.item() == 2.0
    assert not world[0]._brief.is_likely
    for communicator in world:
        communicator.close()
