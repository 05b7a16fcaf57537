"""A script that divides data within the step in which a worker joins."""

from __future__ import annotations

import pytest

from bagua_core.communication.step_interface import StepPlan
from bagua_core.elastic.step.script_ranks import ScriptRanks


class Asked(ScriptRanks):
    def __init__(self, *, heals: bool = False) -> None:
        super().__init__(None)
        self.said: list[str] = []
        self.place = (0, 1)
        self.plan = StepPlan(1, 7, 1 if heals else 0, 2, frozenset({1}))

    def _say(self, text: str) -> None:
        self.said.append(text)

    def place_of_script(self) -> tuple[int, int]:
        return self.place

    def body(self, places: list[tuple[int, int]]) -> None:
        """A loop's body that asks before each forward."""
        self._places_asked = set()
        for number, self.place in enumerate(places):
            self.asked_place()
            if number:
                self._forward_in_step()


def test_it_is_said_once() -> None:
    places = Asked()
    for _ in range(2):
        places.body([(0, 1), (0, 2), (0, 2)])
    [line] = places.said
    assert line.startswith("warning: in step 7 the script asked for rank and world size")


@pytest.mark.parametrize("heals", [False, True])
def test_nothing_is_said_of_equal_numbers_nor_by_the_joiner(heals: bool) -> None:
    places = Asked(heals=heals)
    places.body([(0, 2), (0, 2)])
    if heals:
        places.body([(0, 1), (1, 2)])
    assert not places.said


def test_what_is_asked_behind_the_last_forward_counts_nowhere() -> None:
    places = Asked()
    places.body([(0, 1)])
    places.place = (0, 2)
    places.asked_place()
    places.body([(0, 2), (0, 2)])
    assert not places.said


class InStep(Asked):
    in_step = True  # type: ignore[assignment]


def test_a_collective_that_leaves_a_joiner_out_is_said_once_of_data_divided_in_the_body() -> None:
    places = InStep()
    places.asked_place()  # the rank alone divides nothing
    places.joiner_left_out()
    assert not places.said
    for _ in range(2):
        assert places.asked_size() == 1
        places.joiner_left_out()
    [line] = places.said
    assert line.startswith("warning: in step 7 the script asked for the world size")
    assert "end_step(confirmed=True)" in line


def test_nothing_is_said_of_a_world_size_asked_for_in_an_earlier_step() -> None:
    places = InStep()
    places.asked_size()
    places.plan = StepPlan(1, 8, 0, 2, frozenset({1}))
    places.joiner_left_out()
    assert not places.said
