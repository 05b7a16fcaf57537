"""The plan of a worker that was asked to leave outside a boundary: each rule, and all situations together."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from bagua_contract.records import GenerationKind
from bagua_core.elastic.step.late_leave_plan import (
    FIRST_WRITE_S,
    MARGIN_S,
    Act,
    Form,
    LeaveSituation,
    decide,
    grace_warning,
    part_of,
)
from bagua_core.elastic.step.step_states import IN_STEP, Phase
from tests.core.elastic.records import generation

EARLY = LeaveSituation(left_s=30.0, expected_write_s=4.0)
DUE = replace(EARLY, left_s=4.0 + MARGIN_S)
LAST = replace(EARLY, left_s=MARGIN_S)


def test_a_boundary_is_waited_for_as_long_as_the_write_still_fits() -> None:
    assert decide(EARLY).act is Act.WAIT
    assert decide(replace(EARLY, left_s=DUE.left_s + 0.01)).act is Act.WAIT
    assert decide(DUE).act is Act.SAVE


def test_the_job_that_is_over_and_the_script_that_leaves_are_let_alone() -> None:
    assert decide(replace(LAST, over=True)).act is Act.STAND_BACK
    assert decide(replace(LAST, at_boundary=True)).act is Act.WAIT


def test_before_the_first_step_there_is_nothing_to_wait_for() -> None:
    plan = decide(replace(EARLY, committed=False))
    assert plan.act is Act.LEAVE and "before the first step" in plan.reason
    assert decide(replace(EARLY, trained=False)).act is Act.SAVE, (
        "what collectives before the first step gave"
    )
    joining = replace(EARLY, committed=False, joining=True)
    assert decide(joining).act is Act.WAIT, "the others train and would lose a step"
    assert decide(replace(joining, left_s=LAST.left_s)).act is Act.LEAVE


def test_nothing_is_saved_where_others_go_on_or_nothing_is_kept() -> None:
    plan = decide(replace(LAST, goes_on_without=5))
    assert plan.act is Act.LEAVE and "generation 5" in plan.reason
    assert decide(replace(LAST, saves=False)).act is Act.LEAVE
    for nothing_to_write in (replace(DUE, goes_on_without=5), replace(DUE, saves=False)):
        assert decide(nothing_to_write).act is Act.WAIT, "all the time is left for a boundary"


@pytest.mark.parametrize(
    ("phase", "more", "form"),
    [
        (Phase.BETWEEN, {}, Form.AS_IT_IS),
        (Phase.ANNOUNCED, {"resume_point": True}, Form.AT_RESUME_POINT),
        (Phase.ANNOUNCED, {}, Form.AS_IT_IS),
        (Phase.RUNNING, {"resume_point": True}, Form.AT_RESUME_POINT),
        (Phase.FAILED, {"resume_point": True}, Form.AT_RESUME_POINT),
        (Phase.FINAL, {"resume_point": True}, Form.AT_RESUME_POINT),
        (Phase.FINAL, {"resume_point": True, "parts": 1, "most_parts": 1}, Form.AFTER_COMMIT),
        (Phase.FINAL, {"parts": 2, "most_parts": 1}, Form.AFTER_COMMIT),
    ],
)
def test_which_values_are_the_committed_state(phase: Phase, more: dict[str, bool], form: Form) -> None:
    plan = decide(replace(DUE, phase=phase, **more))  # type: ignore[arg-type]
    assert (plan.act, plan.form) == (Act.SAVE, form)


@pytest.mark.parametrize(
    ("phase", "more", "why"),
    [
        (Phase.BETWEEN, {"stepping": True}, "changing the parameters"),
        (Phase.BETWEEN, {"parts": 1}, "the others are not"),
        (Phase.RUNNING, {"parts": 1, "most_parts": 2}, "more may follow"),
        (Phase.FAILED, {"parts": 1, "most_parts": 1}, "more may follow"),
        (Phase.FINAL, {"parts": 1, "most_parts": 2}, "more may follow"),
        (Phase.FINAL, {"parts": 1}, "more may follow"),
        (Phase.FINAL, {"parts": 1, "most_parts": 1, "backward_open": True}, "more may follow"),
        (Phase.RUNNING, {"provisional": True}, "exchanged"),
        (Phase.FINAL, {"only_optimizers_change": False}, "without an optimizer"),
    ],
)
def test_half_a_state_is_waited_for_and_never_saved(phase: Phase, more: dict[str, bool], why: str) -> None:
    waiting = decide(replace(DUE, phase=phase, **more))  # type: ignore[arg-type]
    assert waiting.act is Act.WAIT and why in waiting.reason
    given_up = decide(replace(LAST, phase=phase, **more))  # type: ignore[arg-type]
    assert given_up.act is Act.GIVE_UP and why in given_up.reason


def test_no_uncommitted_parameters_are_ever_saved() -> None:
    """Over all situations: parameters that an optimizer has changed are saved only after a commit of a final step."""
    saved = 0
    for phase, stepping, provisional, parts, most in product(
        Phase, (False, True), (False, True), (0, 1, 2), (0, 1, 2)
    ):
        plan = decide(
            replace(
                LAST,
                phase=phase,
                resume_point=phase in IN_STEP,
                stepping=stepping,
                provisional=provisional,
                parts=parts,
                most_parts=most,
            )
        )
        assert plan.act in (Act.SAVE, Act.GIVE_UP), "at the last moment nothing is waited for"
        if plan.act is Act.SAVE:
            saved += 1
            assert not stepping
            assert not parts or (plan.form is Form.AFTER_COMMIT and phase is Phase.FINAL and parts >= most)
            assert phase not in IN_STEP or plan.form is not Form.AS_IT_IS
    assert saved


def test_all_members_write_stripes_if_all_of_them_save() -> None:
    now = generation(3, "w0", "w1", base=2)
    intact = {"broken": False, "copied": False}
    assert [part_of(w, now, now, **intact) for w in ("w0", "w1")] == [(0, 2), (1, 2)]
    aside = generation(4, base=3)
    assert not aside.members and part_of("w1", now, aside, **intact) == (1, 2)
    joined = generation(4, "w0", "w1", "w2", base=3)
    assert part_of("w1", now, joined, **intact) == (1, 2)


def test_a_member_writes_the_whole_if_others_may_not_write_their_part() -> None:
    now = generation(3, "w0", "w1", base=2)
    without = generation(4, "w1", base=3)
    assert part_of("w1", now, without, broken=False, copied=False) == (0, 1), "w0 need not save anything"
    lost = generation(4, base=3, kind=GenerationKind.FAILOVER)
    assert part_of("w1", now, lost, broken=False, copied=False) == (0, 1), "it may be behind by a commit"
    assert part_of("w1", now, now, broken=True, copied=False) == (0, 1)
    assert part_of("w1", now, now, broken=False, copied=True) == (0, 1)


def test_a_short_grace_period_is_said_with_numbers_and_the_flag() -> None:
    assert grace_warning(EARLY, measured=True) == ""
    short = replace(EARLY, left_s=1.0, expected_write_s=FIRST_WRITE_S)
    for measured, known in ((True, "as the last one did"), (False, "assumed")):
        text = grace_warning(short, measured=measured)
        assert all(word in text for word in ("1.0 s", "5.0 s", "--shutdown-timeout", known))
    assert grace_warning(replace(short, saves=False), measured=True) == ""
    assert grace_warning(replace(short, committed=False), measured=True) == "", "there is nothing to save"
