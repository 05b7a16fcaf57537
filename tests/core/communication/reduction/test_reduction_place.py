"""Ranks that run different numbers of backwards in a step raise at the next reduction, and average nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagua_core.communication.communicator import Communicator
from bagua_core.communication.reduction.reduction_place import (
    NO_PLACE,
    BackwardsDiffer,
    contribution,
    explain,
)
from bagua_core.communication.reduction.step_counts import differ
from bagua_core.parallel import DistributedDataParallel
from tests.core.communication.worlds import FakeEngine, gloo_world, in_process_world, run_ranks, seeded


class Worker:
    def __init__(self, communicator: Communicator) -> None:
        self.engine = FakeEngine(communicator)
        self.rank = communicator.global_rank
        inner = seeded(lambda: nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        self.model = DistributedDataParallel(inner, [self.optimizer], engine=self.engine)

    def draw(self, backwards: int = 1) -> None:
        """A step of the job with so many backwards."""
        for _ in range(backwards):
            self.model(torch.ones(3, 4)).sum().backward()
        self.optimizer.step()
        self.model.step_committed()
        self.engine.step += 1


@given(st.integers(0, 10**6), st.integers(0, 40), st.integers(-7, 7), st.integers(-7, 7))
def test_near_places_are_told_apart(step: int, number: int, later: int, further: int) -> None:
    one, other = (step, number), (max(0, step + later), max(0, number + further))
    sums = [sum(numbers) for numbers in zip(contribution(one), contribution(other), strict=True)]
    assert differ((sums[0], sums[1], sums[2])) == (one != other)


@pytest.mark.parametrize("build", [in_process_world, gloo_world])
def test_a_rank_that_runs_another_number_of_backwards_is_named_on_all_ranks(build: object) -> None:
    members = [Worker(c) for c in build(3)]  # type: ignore[operator]

    def act(w: Worker) -> str:
        w.draw()
        with pytest.raises(BackwardsDiffer) as raised:
            w.draw(2 if w.rank == 1 else 1)
            w.draw()
        return str(raised.value)

    first, second, third = run_ranks(members, act)
    assert first == second == third
    words = "rank 0 reduces the gradients of backward 1 in step 3 and rank 1 those of backward 2 in step 2"
    assert words in first


def test_equal_numbers_of_backwards_are_right() -> None:
    members = [Worker(c) for c in in_process_world(2)]

    def act(w: Worker) -> None:
        for backwards in (1, 3, 1, 12):
            w.draw(backwards)

    run_ranks(members, act)
    assert all(len(w.engine.pairs) == 17 for w in members)


def test_the_error_leaves_out_ranks_that_copied_the_state() -> None:
    assert "rank 1 reduces the gradients of backward 1 in step 5 and rank 2" in explain(
        [NO_PLACE, (4, 0), (3, 1)]
    )


@pytest.mark.parametrize("places", [[(4, 1), (4, 1)], [NO_PLACE, NO_PLACE]])
def test_the_error_says_so_if_the_sums_are_wrong_and_no_rank_differs(places: list[tuple[int, int]]) -> None:
    assert "does not sum float32 exactly" in explain(places)
