"""The states of a step: transitions, and the error of an event that the table does not have."""

from __future__ import annotations

import pytest

from bagua_core.elastic.step.step_states import (
    IN_STEP,
    TRANSITIONS,
    Event,
    InvalidTransition,
    Phase,
    StepStates,
)


def test_a_step_ends_by_a_commit_or_a_roll_back_and_by_nothing_else() -> None:
    for (before, event), after in TRANSITIONS.items():
        if before in IN_STEP and after not in IN_STEP:
            assert (before, event) in {(Phase.FINAL, Event.COMMIT), (Phase.FAILED, Event.ROLL_BACK)}


def test_a_failure_is_never_taken_back_within_the_step() -> None:
    assert {event for phase, event in TRANSITIONS if phase is Phase.FAILED} == {Event.FAIL, Event.ROLL_BACK}


def test_every_state_can_be_reached_and_left() -> None:
    assert {after for after in TRANSITIONS.values()} == set(Phase)
    assert {before for before, _ in TRANSITIONS} == set(Phase)


def test_an_event_without_a_place_raises_with_what_led_to_it() -> None:
    step = StepStates()
    step.take(Event.BEGIN, "step 7 of generation 2")
    step.take(Event.REDUCE)
    with pytest.raises(InvalidTransition) as caught:
        step.take(Event.ROLL_BACK)
    assert str(caught.value) == (
        "a step that is final cannot roll back (); before that: between steps -begin-> running step 7 of generation 2; "
        "running -reduce-> final"
    )
    assert step.phase is Phase.FINAL
