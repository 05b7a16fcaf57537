"""The rank of a worker that is in a generation and before its first step there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bagua_core.elastic.step.script_ranks import ScriptRanks
from bagua_core.elastic.step.step_states import Event


class Placed(ScriptRanks):
    def __init__(self, global_rank: int, world_size: int, newcomers: frozenset[int]) -> None:
        super().__init__(None)
        self._placed: Any = SimpleNamespace(global_rank=global_rank, world_size=world_size)
        self.newcomers = newcomers

    def communicator(self) -> Any:
        return self._placed


@pytest.mark.parametrize(
    ("global_rank", "newcomers", "place"),
    [
        (1, {1}, (2, 3)),
        (2, {2}, (2, 3)),
        (2, {1, 2}, (1, 2)),
        (0, {1}, (0, 2)),
        (2, {1}, (1, 2)),
        (2, set(), (2, 3)),
    ],
)
def test_a_joiner_is_behind_the_jobs_workers_until_its_first_step(
    global_rank: int, newcomers: set[int], place: tuple[int, int]
) -> None:
    """Also one that trained before: it comes to the end of the epoch that it was left out in, and saves nothing."""
    ranks = Placed(global_rank, 3, frozenset(newcomers))
    assert ranks.place_of_script() == ranks.replica_place() == place
    ranks.states.take(Event.BEGIN)
    assert ranks.place_of_script() == ranks.replica_place() == (global_rank, 3)
