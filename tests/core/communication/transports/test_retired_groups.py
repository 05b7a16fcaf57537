"""Generations that were lost give back their connections and threads, and nothing waits for that."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed
from bagua_core.communication.transports import gloo, retired_groups
from tests.core.communication.worlds import await_true, gloo_world, run_ranks

GENERATIONS = 50


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def lose(generation: int) -> None:
    """A step in which rank 2 never comes; a loss then releases the others."""
    world = gloo_world(3, generation, timeout_s=60.0)

    def act(communicator: gloo.GlooCommunicator) -> None:
        if communicator.global_rank == 2:
            return
        pending = communicator.allreduce(torch.ones(1000))
        communicator.abort("a newer generation")
        with pytest.raises(CollectiveFailed):
            pending.wait()

    run_ranks(world, act)
    world[2].abort("it is lost")


def test_fifty_lost_generations_leave_neither_descriptors_nor_threads() -> None:
    retired_groups.let_go()
    lose(1)
    before = (open_files(), threads())

    def few() -> bool:
        retired_groups.let_go()
        return open_files() < before[0] + 150 and threads() < before[1] + 150

    for generation in range(2, GENERATIONS + 2):
        lose(generation)
        # three groups of three have a dozen descriptors and as many threads: without letting go there were hundreds
        # Destructors have threads of their own, which a busy machine may hold up.
        await_true(few, "destructors keep up")

    def given_back() -> bool:
        retired_groups.let_go()
        return open_files() <= before[0] and threads() <= before[1]

    await_true(given_back, "all groups are destroyed")


def test_a_group_that_is_referenced_is_kept() -> None:
    first, second = gloo_world(2)
    first.abort("x")
    second.abort("x")
    held = first._group
    retired_groups.let_go()
    assert any(group is held for group in retired_groups._retired)


def test_what_only_the_list_holds_is_let_go_on_any_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retired_groups, "_retired", [])
    held = object()
    for group in (object(), held, object()):
        retired_groups.retire(group)
    del group
    assert retired_groups.let_go() == 2
    assert retired_groups._retired == [held]
    del held
    assert retired_groups.let_go() == 1
    assert retired_groups._retired == []


def test_a_group_that_still_works_is_destroyed_beside_everything_else() -> None:
    """All wait for each other, so no destructor can end: the rest of the process must not notice."""
    world = gloo_world(3, timeout_s=3.0)
    for communicator in world:
        pending = communicator.broadcast(torch.ones(10), (communicator.global_rank + 1) % 3)
        communicator.abort("a loss")
        with pytest.raises(CollectiveAborted):
            pending.wait()
    del communicator, pending
    before = threading.active_count()
    world.clear()
    await_true(lambda: retired_groups.let_go() > 0, "groups are let go")
    began_s = time.monotonic()
    for _ in range(1000):
        torch.ones(10).sum()
    assert time.monotonic() - began_s < 1.0
    await_true(lambda: threading.active_count() <= before, "the group's own timeout bounds it")
