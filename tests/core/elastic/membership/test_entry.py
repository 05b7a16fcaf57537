"""All members of a generation learn the same names in rank order, and so draw the same plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_contract.records import StateName
from bagua_core.communication.communicator import CollectiveAborted, CollectiveFailed, Pending
from bagua_core.elastic.membership.entry import Info, exchange
from tests.core.communication.in_process import build_in_process
from tests.core.communication.worlds import run_ranks
from tests.core.elastic.records import generation

COUNT = st.integers(0, 2**62)


def wait(pending: Pending) -> None:
    pending.wait()


def info(name: StateName, outside: bool = False, batch: int = 0) -> Info:
    return Info(name, outside, {"epoch": 1, "batch": batch})


@given(st.builds(StateName, COUNT, COUNT, COUNT), st.booleans(), COUNT, COUNT)
def test_a_row_comes_back_as_it_was(name: StateName, outside: bool, epoch: int, batch: int) -> None:
    own = Info(name, outside, {"epoch": epoch, "batch": batch}, run=batch)
    assert Info.from_row(own.to_row()) == own


def test_all_draw_the_same_plan() -> None:
    """A survivor that committed, one that is a commit behind, and a newcomer."""
    record = generation(4, "a", "b", "c", since={"a": 1, "b": 1})
    own = [info(StateName(3, 8), batch=8), info(StateName(3, 7), batch=7), info(StateName())]
    world = build_in_process(3, 4)

    drawn = run_ranks(world, lambda c: exchange(c, record, own[c.global_rank], wait))

    assert all(each == drawn[0] for each in drawn)
    plan, infos = drawn[0]
    assert infos == own
    assert plan.furthest == StateName(3, 8)
    assert plan.holders == (0,)
    assert (plan.at_once, plan.beside) == ({1}, {2})


def test_a_worker_that_was_left_out_in_between_counts_as_having_nothing() -> None:
    """It never noticed, and went further than the others by itself."""
    record = generation(9, "a", "b", since={"a": 1, "b": 9})
    own = [info(StateName(6, 50)), info(StateName(5, 60))]
    world = build_in_process(2, 9)
    for plan, _ in run_ranks(world, lambda c: exchange(c, record, own[c.global_rank], wait)):
        assert plan.furthest == StateName(6, 50)
        assert plan.holders == (0,) and plan.healing == {1}


def test_a_holder_outside_a_step_makes_everyone_wait() -> None:
    record = generation(4, "a", "b", since={"a": 1})
    own = [info(StateName(3, 8), outside=True), info(StateName())]
    world = build_in_process(2, 4)
    for plan, _ in run_ranks(world, lambda c: exchange(c, record, own[c.global_rank], wait)):
        assert plan.at_once == {1} and not plan.beside


def test_a_lost_peer_ends_the_exchange() -> None:
    record = generation(4, "a", "b")
    world = build_in_process(2, 4)
    world[1].lose("10.0.0.2")
    with pytest.raises(CollectiveFailed) as caught:
        exchange(world[0], record, info(StateName()), wait)
    assert caught.value.hosts == ("10.0.0.2",)


def test_a_silent_peer_ends_it_with_the_abort() -> None:
    record = generation(4, "a", "b")
    world = build_in_process(2, 4)

    def abort(pending: Pending) -> None:
        world[0].abort("generation 5")
        pending.wait()

    with pytest.raises(CollectiveAborted, match="generation 5"):
        exchange(world[0], record, info(StateName()), abort)
